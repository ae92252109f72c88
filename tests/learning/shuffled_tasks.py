"""Writes the tasks of an environment with one field permuted among them: a control, whose rewards teach nothing.

    .quartet/envs/environment/bin/python tests/learning/shuffled_tasks.py verifiers totals a.jsonl '{"id": "carry_on"}'

A run takes them by --set data.train=a.jsonl. Tasks in a file: DATA.jsonl instead of the environment.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from quartet_environment.function import Function

MOST = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="an environment, or DATA.jsonl")
    parser.add_argument("field", help="what the reward depends on")
    parser.add_argument("out", type=Path)
    parser.add_argument("parameters", nargs="?", type=json.loads, default={}, help="of the environment, in JSON")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.source.endswith(".jsonl"):
        rows = [json.loads(line) for line in Path(given.source).read_text().splitlines()]
        changed = rows
    else:
        changed = list(itertools.islice(Function(given.source).tasks(given.parameters), MOST))
        rows = [{"task": task} for task in changed]
    values = [one[given.field] for one in changed]
    random.Random(given.seed).shuffle(values)
    for one, value in zip(changed, values, strict=True):
        one[given.field] = value
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
