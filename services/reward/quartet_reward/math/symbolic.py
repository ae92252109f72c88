"""Decides by sympy and math-verify what a comparison of texts leaves open, and guards their decisions."""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean, BooleanAtom, Not, Or

from quartet_reward.math.compare import Comparison, Decision, EqualityPolicy, Unevaluated, half_a_place
from quartet_reward.math.forms import AND_OR, INTEGERS_WITH, SIGNS, Kind, read
from quartet_reward.math.unevaluated import computation_left

_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_AND = re.compile(r"(?<![a-zA-Z\\])and(?![a-z])")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\s*\^\\circ")
# latex2sympy adds a number before one of these to what follows, as it does in mixed numbers.
_TIMES = re.compile(r"(?<![\w^{])(\d+(?:\.\d+)?)\s*(?=\(|e\s*\^|\\(?:binom|begin|det|gcd|lcm)(?![a-zA-Z]))")
_NO_MIXED = re.compile(r"(?<![\w^{])(\d+)\s*(?=\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})")
# Two exact numbers must agree to this part of their size.
_EXACT = 1e-12
# Where functions are compared: neither integers nor related to each other. The last two are for all real numbers.
_POINTS = tuple(
    tuple(sympy.Rational(sign * p, q) for p, q in pairs)
    for sign, pairs in (
        (1, ((37, 41), (61, 29), (113, 71), (19, 53), (83, 47), (131, 97), (29, 23), (151, 89))),
        (1, ((73, 31), (17, 43), (59, 61), (139, 67), (23, 79), (47, 37), (101, 103), (67, 59))),
        (-1, ((43, 17), (71, 59), (31, 83), (97, 61), (53, 19), (37, 73), (89, 101), (13, 11))),
        (-1, ((11, 67), (79, 23), (127, 73), (41, 89), (61, 107), (17, 29), (103, 43), (59, 31))),
    )
)
_DIGITS = 50
_SAME = sympy.Float(10) ** -40
_MOST_CONSTANTS = 3
# What sympy raises for expressions it cannot handle.
SYMPY_ERRORS = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError)


class SymbolicComparison(Comparison):
    """Decides by math-verify and sympy what `Comparison` leaves open."""

    def expressions(self, answer: str, reference: str) -> Decision:
        """Return whether two expressions, equations or relations are equal."""
        if (decided := super().expressions(answer, reference)) is not None:
            return decided
        gold, found = value_of(reference), value_of(answer)
        if gold is None or found is None or isinstance(found, BooleanAtom):
            return False
        equal = self._values(found, gold, reference)
        number = isinstance(gold, sympy.Expr) and gold.is_number and isinstance(found, sympy.Basic)
        if (
            equal
            and number
            and not self.policy.unevaluated
            and (left := computation_left(answer, found, reference, gold))
        ):
            raise Unevaluated(left)
        return equal

    def _values(self, found: sympy.Basic, gold: sympy.Basic, reference: str) -> bool:
        if isinstance(gold, sympy.Eq):
            if not isinstance(found, sympy.Eq):
                # A reference without variables, such as \log_2(32) = 5.
                return is_constant(gold) and self._same(found, gold.rhs, reference)
            return not is_constant(found) and self._same_equation(found, gold)
        if isinstance(found, sympy.Eq):
            return False
        if _is_relation(gold) or _is_relation(found):
            return self._same_solutions(gold, found)
        # math-verify holds the interval [7,7] equal to 7.
        return isinstance(gold, sympy.Set) is isinstance(found, sympy.Set) and self._same(found, gold, reference)

    def rounds(self, exact: str, rounded: str) -> Decision:
        """Return whether one expression is the other one rounded to its written places."""
        values = numbers([exact, rounded])
        if values is None:
            return False
        return bool(abs(values[0] - values[1]).evalf() <= max(half_a_place(exact), half_a_place(rounded)))

    def _same(self, found: sympy.Basic, gold: sympy.Basic, reference: str) -> bool:
        """Compare numbers and functions at points, as sympy's `equals` does; all else by math-verify."""
        if self.policy.any_names or not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr)):
            return self._verified(gold, found)
        if gold.is_number and found.is_number:
            return self._verified(gold, found) and not _apart(gold, found, self.policy)
        positive = gold.has(sympy.log) or any(not power.exp.is_integer for power in gold.atoms(sympy.Pow))
        for renamed in _with_constants_of(reference, gold, found):
            if (same := self._same_function(renamed, gold, positive)) is None:
                same = self._verified(gold, renamed)
            if same:
                return True
        return False

    def _same_function(self, found: sympy.Expr, gold: sympy.Expr, positive: bool) -> bool | None:
        """Return whether two functions agree at all points, or all `positive` ones; None: not computable."""
        symbols = sorted(gold.free_symbols | found.free_symbols, key=lambda symbol: symbol.name)
        if len(symbols) > len(_POINTS[0]) or gold.atoms(AppliedUndef) or found.atoms(AppliedUndef):
            return None
        exact = not (gold.has(sympy.Float) or found.has(sympy.Float))
        tolerance = _SAME if exact else sympy.Float(10) ** (1 - self.policy.decimal_places)
        for point in _POINTS[:2] if positive else _POINTS:
            values = dict(zip(symbols, point, strict=False))
            try:
                one, other = (value.subs(values).doit() for value in (found, gold))
                difference, scale = (
                    (one - other).evalf(_DIGITS),
                    max(abs(other.evalf(_DIGITS)), abs(one.evalf(_DIGITS))),
                )
                if not (difference.is_number and scale.is_number) or scale.has(sympy.nan, sympy.zoo, sympy.oo):
                    return None
                if exact and one.is_Rational and other.is_Rational:
                    if one != other:
                        return False
                elif not bool(abs(difference) <= tolerance * scale):
                    return False
            except SYMPY_ERRORS:
                return None
        return True

    def _verified(self, gold: sympy.Basic, found: sympy.Basic) -> bool:
        return verify(
            [gold],
            [found],
            float_rounding=self.policy.decimal_places,
            strict=not self.policy.any_names,
            allow_set_relation_comp=self.policy.relations_as_sets,
            timeout_seconds=None,  # SIGALRM cannot interrupt native code; the service kills this process
        )

    def _same_equation(self, found: sympy.Eq, gold: sympy.Eq) -> bool:
        """Return whether equations say the same: not (x - 1)^2 = 0 for x = 1, which has the same solutions."""
        multiples = None if self.policy.any_names else self._multiples(found, gold)
        return self._verified(gold, found) if multiples is None else multiples

    def _multiples(self, found: sympy.Eq, gold: sympy.Eq) -> bool | None:
        """Return whether one equation is the other one times what is nowhere zero on the solutions; None: unknown."""
        try:
            one, other = (sympy.together(_without_functions(each.lhs - each.rhs)) for each in (found, gold))
            ratio = sympy.cancel(one / other)
            if ratio.is_number:
                return bool(ratio.is_finite and not ratio.is_zero)
            over, under = sympy.fraction(ratio)
            if sympy.gcd(over, sympy.fraction(one)[0]) != 1 or sympy.gcd(under, sympy.fraction(other)[0]) != 1:
                return False
        except (*SYMPY_ERRORS, sympy.PolynomialError):
            pass
        return None

    def _same_solutions(self, gold: sympy.Basic, found: sympy.Basic) -> bool:
        """Compare relations by their solution sets if each has one variable, else by math-verify."""
        if not all(_is_relation(value) or isinstance(value, sympy.Set | sympy.Tuple) for value in (gold, found)):
            return False
        expected, given = _solutions(gold), _solutions(found)
        if expected is None or given is None:
            return self._verified(gold, found)
        named_alike = "" in (expected[0], given[0]) or expected[0] == given[0] or self.policy.any_names
        return named_alike and (expected[1] == given[1] or self._verified(expected[1], given[1]))


def _with_constants_of(reference: str, gold: sympy.Expr, found: sympy.Expr) -> Iterator[sympy.Expr]:
    """Yield the answer, then the answer with its constants of integration named as those of the reference, C or C_1.

    In solutions with exponentials, sines and cosines, A, B and K are constants too.
    """
    yield found
    text = re.sub(r"\\[a-zA-Z]+", " ", reference)
    letters = "[ABCK]" if gold.has(sympy.exp, sympy.sin, sympy.cos) else "C"
    found_names = re.findall(rf"({letters})(?:_\{{?(\w)\}}?)?", text)
    names = {f"{letter}_{index}".lower().rstrip("_") for letter, index in found_names}
    constants = sorted((one for one in gold.free_symbols if one.name in names), key=lambda one: one.name)
    if not constants or len(constants) > _MOST_CONSTANTS or gold.free_symbols == set(constants):
        return
    ours = sorted(
        (found.free_symbols - gold.free_symbols) | (found.free_symbols & set(constants)), key=lambda one: one.name
    )
    if len(ours) == len(constants) and all(re.fullmatch(r"[a-z](_\w)?|constant", one.name) for one in ours):
        for order in permutations(constants):
            yield found.subs(dict(zip(ours, order, strict=True)), simultaneous=True)


def _solutions(value: sympy.Basic) -> tuple[str, sympy.Set] | None:
    if isinstance(value, sympy.Set):
        return "", value
    if not isinstance(value, Boolean):
        return None
    # The variable of 0 < f(x) < 1 is f(x), not x.
    value = _without_functions(value)
    if len(value.free_symbols) != 1:
        return None
    symbol = next(iter(value.free_symbols))
    try:
        return symbol.name, value.as_set()
    except SYMPY_ERRORS:
        pass
    try:  # |x| < 2 and the like
        return symbol.name, sympy.solveset(value, symbol, sympy.S.Reals)
    except SYMPY_ERRORS:
        return None


def _without_functions(value: sympy.Basic) -> sympy.Basic:
    return value.xreplace({applied: sympy.Symbol(str(applied), real=True) for applied in value.atoms(AppliedUndef)})


def _is_relation(value: sympy.Basic) -> bool:
    """Return whether it is an inequality, or several; sympy holds a symbol for a Boolean too."""
    return isinstance(value, Relational | And | Or | Not) and not isinstance(value, sympy.Eq)


@lru_cache(maxsize=64)
def value_of(text: str) -> sympy.Basic | None:
    """Return an expression, equation or relation as sympy's object, or None if it cannot be parsed."""
    try:
        value = _parsed(text)
    except MemoryError:
        raise
    except Exception:  # the parser raises its own exceptions and many of Python's
        return None
    if not isinstance(value, (sympy.Basic, sympy.MatrixBase)):
        return None
    imaginary = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.subs(imaginary) if imaginary else value


def _parsed(text: str) -> object:
    form = read(text)
    if integers := INTEGERS_WITH.fullmatch(text):
        relation = value_of(integers["relation"])
        numbers = sympy.S.Integers if integers["set"] == "Z" else sympy.S.Naturals
        return relation.as_set().intersect(numbers) if isinstance(relation, Boolean) else None
    related = Kind.RELATION in (form.kind, *(part.kind for part in form.parts))
    if related and (AND_OR.search(text) or SIGNS.search(text) or "," in text):
        return _connected(text)
    if form.kind is Kind.TUPLE:
        text = text.replace(";", ",")
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)
    text = _TIMES.sub(r"\1 \\cdot ", text)
    text = _NO_MIXED.sub(lambda match: match[0] if int(match[2]) < int(match[3]) else rf"{match[1]} \cdot ", text)
    return latex2sympy(text, is_real=True, normalization_config=_NORMALIZATION)


def _connected(text: str) -> sympy.Basic | None:
    """Return the relation that `x < -1 or x > 1`, `x \\ne \\pm 5` or `x \\ne 1, 4` states."""
    differs = re.match(r"[^,]*\\ne(?![a-zA-Z])", text)
    alternatives = []
    for alternative in re.split(r"(?<![a-zA-Z\\])or(?![a-z])|,", text):
        signed = [SIGNS.sub(sign, alternative) for sign in "+-"] if SIGNS.search(alternative) else [alternative]
        parts = [part.strip() for one in signed for part in _AND.split(one)]
        values = [
            value_of(f"{differs[0]} {part}" if differs and r"\ne" not in part else part) for part in parts if part
        ]
        if not values or not all(isinstance(value, Boolean) for value in values):
            return None
        alternatives.append(sympy.And(*values))
    # A comma after \ne means "and" (x differs from each value), after other relations "or".
    both = differs and not re.search(r"\bor\b", text)
    return sympy.And(*alternatives) if both else sympy.Or(*alternatives)


def is_constant(value: sympy.Basic) -> bool:
    """Return whether an equation is always true or always false, such as x = x or 1 = 2."""
    if not isinstance(value, sympy.Eq):
        return False
    try:
        return bool(sympy.simplify(value.lhs - value.rhs).is_number)
    except SYMPY_ERRORS:
        return False  # math-verify compares the sides that sympy cannot subtract


def numbers(texts: list[str]) -> list[sympy.Expr] | None:
    values = [value for value in map(value_of, texts) if isinstance(value, sympy.Expr) and value.is_number]
    return values if len(values) == len(texts) else None


def _apart(gold: sympy.Expr, found: sympy.Expr, policy: EqualityPolicy) -> bool:
    """Return whether two numbers differ by more than rounding; math-verify holds some such numbers equal."""
    try:
        one, other = gold.doit(), found.doit()
        if one.is_Rational and other.is_Rational:
            return one != other
        tolerance = 10.0 ** (1 - policy.decimal_places) if one.has(sympy.Float) or other.has(sympy.Float) else _EXACT
        distance, scale = abs((one - other).evalf(30)), max(abs(one.evalf(30)), abs(other.evalf(30)))
        return bool(distance > tolerance * scale)
    except SYMPY_ERRORS:
        return False  # without numeric values, math-verify's decision stands
