"""The worker process that compares mathematical answers, one at a time. Run by `python -m quartet_reward.math.worker`.

It has no state and may be killed at any moment. Requests and answers:

    -> {"reference": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "judged", "is_text": false} | {"event": "bad_reference", "reason": "…"}

    -> {"reference": "…", "answer": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "done", "equal": true, "left": "a sum"}      left: what an equal answer leaves to compute

    <- {"event": "out_of_memory", "last": true} | {"event": "failed", "reason": "…"}      to either
"""

# ruff: noqa: E402

import argparse
import gc
import logging
import math
import os
import resource

_NICE = 5  # like sandboxed programs: a hostile answer uses a CPU until its deadline
if __name__ == "__main__":  # before the imports, which are most of its start
    gc.disable()
    os.nice(_NICE)

import sympy
from sympy.logic.boolalg import BooleanAtom

from quartet_reward.errors import BadReference
from quartet_reward.math.compare import EqualityPolicy, Unevaluated
from quartet_reward.math.forms import Form, Kind, read
from quartet_reward.math.notation import tokens
from quartet_reward.math.symbolic import SymbolicComparison, is_constant, numbers, value_of
from quartet_server import worker_protocol


def judge_reference(reference: str, policy: EqualityPolicy) -> bool:
    """Return True if a reference is mathematics, False if it is text, which an answer must repeat exactly.

    Raises:
        BadReference: its braces do not match, or it is a statement that is always true or always false.
    """
    form = read(reference, policy.bare_braces)
    for leaf in form.leaves():
        if leaf.kind in (Kind.WORDS, Kind.CLOCK):
            continue
        value = value_of(leaf.text)
        if value is None:
            if not _is_balanced(reference):
                raise BadReference(f"'{_short(reference)}' cannot be read as mathematics: its braces do not match")
            return False
        if value in (sympy.nan, sympy.zoo):
            raise BadReference(f"'{_short(reference)}' reads as {value}, which cannot be compared")
        if isinstance(value, BooleanAtom) or (is_constant(value) and not _is_computation(leaf)):
            raise BadReference(f"'{_short(reference)}' is always true or always false: nothing can be compared with it")
    return True


def compare(reference: str, answer: str, policy: EqualityPolicy) -> bool:
    """Return whether an answer equals a reference that `judge_reference` accepted; False if comparing them fails.

    Raises:
        Unevaluated: it is equal, but leaves something to compute.
        MemoryError: the comparison needs too much memory.
    """
    try:
        forms = (read(text, policy.bare_braces) for text in (answer, reference))
        return SymbolicComparison(policy).equal(*forms) is True
    except (MemoryError, Unevaluated):
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


def _is_computation(equation: Form) -> bool:
    """Return whether the sides are the same number, written differently: `\\log_2(32) = 5`."""
    sides = numbers([side.text for side in equation.parts])
    written = {tokens(side.text) for side in equation.parts}
    return sides is not None and len(written) == len(sides) and all((side - sides[-1]).equals(0) for side in sides)


def _is_balanced(text: str) -> bool:
    return text.count("{") == text.count("}") and text.count("$") % 2 == 0


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()

    def load() -> worker_protocol.Answer:
        logging.disable(logging.WARNING)
        warm_up()
        gc.freeze()
        gc.enable()
        resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
        return _answer

    worker_protocol.serve(arguments.parent, load)


def _answer(request: dict) -> dict:
    _limit_cpu(request["cpu_seconds"])
    policy = EqualityPolicy(**request.get("policy", {}))
    try:
        if "answer" in request:
            return {"event": "done", "equal": compare(request["reference"], request["answer"], policy), "left": ""}
        return {"event": "judged", "is_text": not judge_reference(request["reference"], policy)}
    except Unevaluated as unevaluated:
        return {"event": "done", "equal": True, "left": str(unevaluated)}
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
