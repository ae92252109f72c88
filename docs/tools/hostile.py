"""docs/hostile.md: the programs, cheats and answers of tests/hostile, with what each tries and how it must end.

.quartet/envs/reward/bin/python docs/tools/hostile.py     prints the page
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from escaping import escaped

ROOT = Path(__file__).resolve().parents[2]

HEAD = """\
# Hostile programs and answers

The attacks that `make hostile` runs against the reward service. This page is generated from `tests/hostile` by
`docs/tools/write.py`.

"""
PROGRAMS = """\
## Programs against the sandbox

All run concurrently with honest programs, in every mode of the [sandbox](sandbox.md) that works on the machine. Each
program must end in one of the given ways without success. Afterwards no process, descriptor or memory is leaked, and
the sandbox still works.

"""
CHEATS = """\
## Programs against their tests

Wrong programs that try to be accepted by the verifier [`code`](code.md). None is accepted.

"""
POSSIBLE = """\
## Cheats that stay possible

A weak test accepts wrong programs. `tests/hostile/weak_tests.py` has, for each of these cheats, a wrong program and a
test that accepts it. The last two need a test that is not strict.

"""
ANSWERS = """\
## Answers against the mathematical verifiers

Each answer is sent to a service with real workers and a deadline of one second. The service must return an allowed
outcome within 1.2 s, give a reward only to right answers, and serve other callers meanwhile. "incorrect" is allowed for
endless computations because sympy may decide some of them without computing.

"""


def page() -> str:
    """Return the page, made in the reward service's environment."""
    python = ROOT / ".quartet" / "envs" / "reward" / "bin" / "python"
    return subprocess.run([python, __file__], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def shown(text: str) -> str:
    """Return a text with "<word>" and "**" escaped."""
    return escaped(text).replace("*", r"\*")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---" for _ in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written() -> str:
    """Return the page, from the modules of tests/hostile."""
    from quartet.v1 import reward_pb2

    from tests.hostile.answers import ANSWERS as answers
    from tests.hostile.cheats import CHEATS as cheats
    from tests.hostile.cheats import ERROR_CHEATS, SCRIPT_CHEATS
    from tests.hostile.programs import PROGRAMS as programs
    from tests.hostile.weak_tests import DECEPTIONS, STILL_POSSIBLE

    def outcome(number: int) -> str:
        return reward_pb2.Outcome.Name(number).removeprefix("OUTCOME_").lower().replace("_", " ")

    ends = (
        [each.name, shown(each.tries), ", ".join((*each.endings, *(["refused"] * each.refused)))] for each in programs
    )
    allowed = ([each.name, shown(each.tries), ", ".join(map(outcome, sorted(each.allowed)))] for each in answers)
    every = (*cheats, *DECEPTIONS, *ERROR_CHEATS, *SCRIPT_CHEATS)
    named = dict.fromkeys((f"`{each.name}`", shown(each.tries)) for each in every)  # several have variants
    possible = ([f"`{each.name}`", shown(each.tries)] for each in STILL_POSSIBLE)
    return (
        HEAD
        + (PROGRAMS + table(("program", "tries", "ends"), ends))
        + ("\n" + CHEATS + table(("cheat", "tries to"), named))
        + ("\n" + POSSIBLE + table(("cheat", "does"), possible))
        + ("\n" + ANSWERS + table(("answer", "tries to", "outcomes allowed"), allowed))
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.stdout.write(written())
