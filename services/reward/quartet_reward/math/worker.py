"""The worker process that compares mathematical answers, one at a time. Run by `python -m quartet_reward.math.worker`.

It has no state and may be killed at any moment. Requests and answers:

    -> {"reference": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "judged", "is_text": false} | {"event": "bad_reference", "reason": "…"}

    -> {"reference": "…", "answer": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "done", "equal": true}

    <- {"event": "out_of_memory", "last": true} | {"event": "failed", "reason": "…"}      to either
"""

import argparse
import logging
import math
import re
import resource
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean, BooleanAtom

from quartet_reward.errors import BadReference
from quartet_reward.math.compare import Comparison, Decision, EqualityPolicy, half_a_place
from quartet_reward.math.forms import AND_OR, SIGNS, Form, Kind, read
from quartet_reward.math.notation import tokens
from quartet_reward.workers import protocol

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_AND = re.compile(r"(?<![a-zA-Z\\])and(?![a-z])")
# Two numbers math-verify calls equal must agree to this part of their size, unless one of them is rounded.
_EXACT = 1e-12
_NICE = 5  # like sandboxed programs: a hostile answer uses a CPU until its deadline
# What sympy raises for expressions it cannot handle.
_SYMPY_ERRORS = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError)


def judge_reference(reference: str, policy: EqualityPolicy) -> bool:
    """Return True if a reference is mathematics, False if it is text, which an answer must repeat exactly.

    Raises:
        BadReference: it is neither, or a statement that is always true or always false.
    """
    if reference.strip().casefold() in ("true", "false"):
        raise BadReference(f"'{reference}' is not a value; for true-or-false questions use the verifier 'exact'")
    form = read(reference, policy.bare_braces)
    for leaf in form.leaves():
        if leaf.kind in (Kind.WORDS, Kind.CLOCK):
            continue
        value = _value(leaf.text)
        if value is None:
            if "\\" in reference or reference.count("{") != reference.count("}"):
                raise BadReference(f"'{_short(reference)}' cannot be read as mathematics")
            return False
        if value in (sympy.nan, sympy.zoo):
            raise BadReference(f"'{_short(reference)}' reads as {value}, which cannot be compared")
        if isinstance(value, BooleanAtom) or (_is_constant(value) and not _is_computation(leaf)):
            raise BadReference(f"'{_short(reference)}' is always true or always false: nothing can be compared with it")
    return True


def compare(reference: str, answer: str, policy: EqualityPolicy) -> bool:
    """Return whether an answer equals a reference that `judge_reference` accepted; False if comparing them fails.

    Raises:
        MemoryError: the comparison needs too much memory.
    """
    try:
        forms = (read(text, policy.bare_braces) for text in (answer, reference))
        return SymbolicComparison(policy).equal(*forms) is True
    except MemoryError:
        raise
    except Exception:  # e.g. RecursionError for a deeply nested answer
        return False


def warm_up() -> None:
    """Compare one answer of each kind, which builds the parser's tables before any deadline runs."""
    for reference, answer in (
        (r"x^2 + \sin x", r"\sin(x) + x^2 + y"),
        (r"(1, \sqrt{x})", "(1, y!)"),
        ("x < 3", "4 > x"),
    ):
        compare(reference, answer, EqualityPolicy())


class SymbolicComparison(Comparison):
    """Decides by math-verify and sympy what `Comparison` leaves open."""

    def expressions(self, answer: str, reference: str) -> Decision:
        """Return whether two expressions, equations or relations are equal."""
        if (decided := super().expressions(answer, reference)) is not None:
            return decided
        gold, found = _value(reference), _value(answer)
        if gold is None or found is None or isinstance(found, BooleanAtom):
            return False
        if isinstance(gold, sympy.Eq) and not isinstance(found, sympy.Eq):
            # A reference without variables, such as \log_2(32) = 5.
            return _is_constant(gold) and self._verified(gold.rhs, found)
        if isinstance(found, sympy.Eq) and _is_constant(found):
            return False
        if _is_relation(gold) or _is_relation(found):
            return self._same_solutions(gold, found)
        # math-verify holds the interval [7,7] equal to 7.
        return isinstance(gold, sympy.Set) is isinstance(found, sympy.Set) and self._verified(gold, found)

    def rounds(self, exact: str, rounded: str) -> Decision:
        """Return whether one expression is the other one rounded to its written places."""
        values = _numbers([exact, rounded])
        if values is None:
            return False
        return bool(abs(values[0] - values[1]).evalf() <= max(half_a_place(exact), half_a_place(rounded)))

    def _verified(self, gold: sympy.Basic, found: sympy.Basic) -> bool:
        equal = verify(
            [gold],
            [found],
            float_rounding=self.policy.decimal_places,
            strict=not self.policy.any_names,
            allow_set_relation_comp=self.policy.relations_as_sets,
            timeout_seconds=None,  # SIGALRM cannot interrupt native code; the service kills this process
        )
        return equal and not _apart(gold, found, self.policy)

    def _same_solutions(self, gold: sympy.Basic, found: sympy.Basic) -> bool:
        """Compare relations by their solution sets if each has one variable, else by math-verify."""
        expected, given = _solutions(gold), _solutions(found)
        if expected is None or given is None:
            return self._verified(gold, found)
        named_alike = "" in (expected[0], given[0]) or expected[0] == given[0] or self.policy.any_names
        return named_alike and (expected[1] == given[1] or self._verified(expected[1], given[1]))


def _solutions(value: sympy.Basic) -> tuple[str, sympy.Set] | None:
    if isinstance(value, sympy.Set):
        return "", value
    if not isinstance(value, Boolean):
        return None
    # The variable of 0 < f(x) < 1 is f(x), not x.
    value = value.xreplace({applied: sympy.Symbol(str(applied), real=True) for applied in value.atoms(AppliedUndef)})
    if len(value.free_symbols) != 1:
        return None
    try:
        return value.free_symbols.pop().name, value.as_set()
    except _SYMPY_ERRORS:
        return None


def _is_relation(value: sympy.Basic) -> bool:
    return isinstance(value, Boolean) and not isinstance(value, sympy.Eq)


@lru_cache(maxsize=64)
def _value(text: str) -> sympy.Basic | None:
    """Return an expression, equation or relation as sympy's object, or None if it cannot be parsed."""
    try:
        if read(text).kind is Kind.RELATION and (AND_OR.search(text) or SIGNS.search(text) or "," in text):
            return _connected(text)
        value = latex2sympy(text, is_real=True, normalization_config=_NORMALIZATION)
    except MemoryError:
        raise
    except Exception:  # the parser raises its own exceptions and many of Python's
        return None
    if not isinstance(value, (sympy.Basic, sympy.MatrixBase)):
        return None
    imaginary = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.subs(imaginary) if imaginary else value


def _connected(text: str) -> sympy.Basic | None:
    """Return the relation that `x < -1 or x > 1`, `x \\ne \\pm 5` or `x \\ne 1, 4` states."""
    differs = re.match(r"[^,]*\\ne(?![a-zA-Z])", text)
    alternatives = []
    for alternative in re.split(r"(?<![a-zA-Z\\])or(?![a-z])|,", text):
        signed = [SIGNS.sub(sign, alternative) for sign in "+-"] if SIGNS.search(alternative) else [alternative]
        parts = [part.strip() for one in signed for part in _AND.split(one)]
        values = [_value(f"{differs[0]} {part}" if differs and r"\ne" not in part else part) for part in parts if part]
        if not values or not all(isinstance(value, Boolean) for value in values):
            return None
        alternatives.append(sympy.And(*values))
    # A comma after \ne means "and" (x differs from each value), after other relations "or".
    both = differs and not re.search(r"\bor\b", text)
    return sympy.And(*alternatives) if both else sympy.Or(*alternatives)


def _is_constant(value: sympy.Basic) -> bool:
    """Return whether an equation is always true or always false, such as x = x or 1 = 2."""
    if not isinstance(value, sympy.Eq):
        return False
    try:
        return bool(sympy.simplify(value.lhs - value.rhs).is_number)
    except _SYMPY_ERRORS:
        return False  # math-verify compares the sides that sympy cannot subtract


def _is_computation(equation: Form) -> bool:
    """Return whether the sides are the same number, written differently: `\\log_2(32) = 5`."""
    sides = _numbers([side.text for side in equation.parts])
    written = {tokens(side.text) for side in equation.parts}
    return sides is not None and len(written) == len(sides) and all((side - sides[-1]).equals(0) for side in sides)


def _numbers(texts: list[str]) -> list[sympy.Expr] | None:
    values = [value for value in map(_value, texts) if isinstance(value, sympy.Expr) and value.is_number]
    return values if len(values) == len(texts) else None


def _apart(gold: object, found: object, policy: EqualityPolicy) -> bool:
    """Return whether two numbers differ by more than rounding; math-verify holds some such numbers equal."""
    if not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr) and gold.is_number and found.is_number):
        return False
    if gold.has(sympy.UnevaluatedExpr) or found.has(sympy.UnevaluatedExpr):
        return False  # 50% is 50 and 0.5
    try:
        one, other = gold.doit(), found.doit()
        if one.is_Rational and other.is_Rational:
            return one != other
        tolerance = 10.0 ** (1 - policy.decimal_places) if one.has(sympy.Float) or other.has(sympy.Float) else _EXACT
        distance, scale = abs((one - other).evalf(30)), max(abs(one.evalf(30)), abs(other.evalf(30)))
        return bool(distance > tolerance * scale)
    except _SYMPY_ERRORS:
        return False  # without numeric values, math-verify's decision stands


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()

    def load() -> protocol.Answer:
        logging.disable(logging.WARNING)
        warm_up()
        resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
        return _answer

    protocol.serve(arguments.parent, load, _NICE)


def _answer(request: dict) -> dict:
    _limit_cpu(request["cpu_seconds"])
    policy = EqualityPolicy(**request.get("policy", {}))
    try:
        if "answer" in request:
            return {"event": "done", "equal": compare(request["reference"], request["answer"], policy)}
        return {"event": "judged", "is_text": not judge_reference(request["reference"], policy)}
    except BadReference as bad:
        return {"event": "bad_reference", "reason": str(bad)}
    except MemoryError:
        return {"event": "out_of_memory", "last": True}  # this process would lack memory for the next answer too
    except Exception as error:  # of sympy
        return {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}


def _limit_cpu(seconds: float) -> None:
    """Let the kernel kill this process after so much more CPU time, in case the service does not."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
