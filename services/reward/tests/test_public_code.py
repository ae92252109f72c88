"""The checker of docs/data.md, which runs those of open-r1/codeforces in the sandbox."""

import re
from pathlib import Path

import pytest
from reward_samples import judged, program

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
ANY_ORDER = """
import sys

def numbers(path):
    with open(path) as file:
        return sorted(map(int, file.read().split()))

def main():
    given, expected, answer = sys.argv[1:4]
    print(1 if len(numbers(given)) == 3 and numbers(answer) == numbers(expected) else 0)
    sys.exit(0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("printed", "reward"), [("3 1 2", 1.0), ("1 1 2", 0.0), ("one", 0.0)])
async def test_a_checker_that_reads_three_files_decides(sandbox, printed, reward):
    (checker,) = re.findall(r'CHECKER = """\n(.*?)"""', PAGE, re.DOTALL)
    parameters = {"checker": f"SOURCE = {ANY_ORDER!r}\n{checker}"}
    found = await judged(sandbox, program(f"print({printed!r})", [("2 3 1\n", "1 2 3\n")]), **parameters)
    assert found.score.reward == reward and not found.HasField("failure"), found
