"""Verification of programs by assert-style tests, beside harnesses that run a Python process for each.

    .quartet/envs/reward/bin/python benchmarks/programs.py [FILE]     (or DATA=folder in the environment)

Ours: a reward service with eight slots, called over gRPC with all problems at once. A judged execution uses two slots,
one for the program and one for its tests, so four problems run concurrently; each is fully isolated.

Peers: four concurrent processes, not isolated, whose exit status is the verdict. Each program runs with its tests in a
Python process, in three variants, whose choice affects the ratio more than anything else here:

- a harness as in trainers: `python` with the sixteen imports that ColossalChat adds to every program;
- plain Python: `python` as installed, with `site`, and only the program's own imports;
- bare Python: `python -I -S`, without `site`, less than any harness does, as a limit.

FILE: problems in HumanEval's format (JSONL, optionally gzipped), by default DATA's `humaneval/HumanEval.jsonl.gz`, else
160 similar ones generated from a seed. If any verdict is wrong, no figure is reported.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from measuring import Figure, in_turn, report, seconds_of, service
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.channel import connect_sync

PROBLEMS = 160
PROCESSES = 4
ROUNDS = 3
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins"),
)
IMPORTS = "".join(f"from {module} import *\n" for module in _MODULES)
SECONDS = 60

# Bodies of f(items, number), as short as the problems that models are asked.
_BODIES = (
    "return [each * number for each in items if each % 2 == 0]",
    "total = 0\n    for each in items:\n        total = (total * 31 + each) % (number + 1000)\n    return total",
    "return sorted(items, key=lambda each: (each % number, each))",
    "seen = {}\n    for each in items:\n        seen[each % number] = seen.get(each % number, 0) + 1\n    return seen",
    "return ''.join(chr(97 + each % 26) for each in items)[::-1]",
    "best = items[0]\n    for each in items[1:]:\n        best = max(best + each, each)\n    return best - number",
    "return any(a + b == number for i, a in enumerate(items) for b in items[i + 1 :])",
    "return tuple(zip(items, items[number % len(items) :]))",
)


def make_problems(count: int) -> list[dict[str, str]]:
    """Problems with seven assertions each."""
    rng = random.Random(0)
    problems = []
    for index in range(count):
        solution = f"    {_BODIES[index % len(_BODIES)]}\n"
        prompt = 'def f(items: list, number: int):\n    """Do to the items what the problem says."""\n'
        namespace: dict = {}
        exec(prompt + solution, namespace)
        test = "def check(candidate):\n"
        for _ in range(7):
            items = [rng.randint(-50, 50) for _ in range(rng.randint(3, 12))]
            number = rng.randint(2, 9)
            test += f"    assert candidate({items}, {number}) == {namespace['f'](items, number)!r}\n"
        problems.append({"prompt": prompt, "canonical_solution": solution, "test": test, "entry_point": "f"})
    return problems


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems of a file."""
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def item_of(index: int, problem: dict[str, str]) -> reward_pb2.ScoreItem:
    """Return the score item of a problem."""
    code = reward_pb2.VerifierSpec(name="code")
    code.parameters.update({"prefix": problem["prompt"]})  # of which some tests use helpers
    return reward_pb2.ScoreItem(
        item_id=str(index),
        completion=f"```python\n{problem['canonical_solution']}\n```",
        reference=reward_pb2.Reference(test_program=problem["test"], entry_point=problem["entry_point"]),
        verifiers=[code],
    )


def run_python(problem: dict[str, str], options: Sequence[str], imports: str) -> bool:
    """A Python process for a problem."""
    parts = [imports, problem["prompt"], problem["canonical_solution"], "\n", problem["test"], "\n"]
    command = [sys.executable, *options, "-c", f"{''.join(parts)}check({problem['entry_point']})\n"]
    return subprocess.run(command, timeout=SECONDS, capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Programs verified by the service, beside a Python process for each.")
    data = os.environ.get("DATA")
    default = Path(data, "humaneval", "HumanEval.jsonl.gz") if data else None
    parser.add_argument("file", type=Path, nargs="?", default=default, help="problems in HumanEval's format")
    arguments = parser.parse_args()
    problems = read_problems(arguments.file) if arguments.file else make_problems(PROBLEMS)
    request = reward_pb2.ScoreRequest(items=[item_of(index, problem) for index, problem in enumerate(problems)])

    with (
        tempfile.TemporaryDirectory() as folder,
        service("reward", Path(folder), [f"reward.sandbox.slots={2 * PROCESSES}"]) as address,
        connect_sync(address) as channel,
        ThreadPoolExecutor(PROCESSES) as pool,
    ):
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        def ours() -> list[bool]:
            results = stub.Score(request, timeout=10 * SECONDS).results
            for each in results:
                if each.score.outcome != reward_pb2.OUTCOME_CORRECT:
                    print(each, file=sys.stderr)
            return [result.score.outcome == reward_pb2.OUTCOME_CORRECT for result in results]

        def each_by_python(options: Sequence[str], imports: str) -> list[bool]:
            return list(pool.map(lambda problem: run_python(problem, options, imports), problems))

        peers = (
            ("", partial(each_by_python, [], IMPORTS), "a Python process for each with a harness's imports"),
            (", plain", partial(each_by_python, [], ""), "python for each, nothing imported"),
            (", bare", partial(each_by_python, ["-I", "-S"], ""), "python -I -S for each, nothing imported"),
        )
        for name, verdicts in (("the service", ours()), *((name, peer()) for _, peer, name in peers)):
            if not all(verdicts):
                raise RuntimeError(f"{name} rejects {verdicts.count(False)} of {len(problems)}: nothing to compare")
        name = f"programs: {len(problems)} programs with assert-style tests"
        figures = []
        for suffix, peer, peer_name in peers:
            pair = in_turn(partial(seconds_of, ours), partial(seconds_of, peer), ROUNDS, warm_up=0)
            figures.append(Figure(name + suffix, "s", *pair, peer_name, "lower"))
    report(*figures)


if __name__ == "__main__":
    main()
