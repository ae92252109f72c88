"""Converts GSM8K and competition problems, as published, to the data of `run.toml`.

    .quartet/envs/client/bin/python examples/mathematics/prepare.py .quartet/mathematics \\
        --train gsm8k/train.jsonl math/train.jsonl --heldout gsm8k=gsm8k/test.jsonl math500=math500.jsonl

A line is a problem: {"question", "answer": "… #### 18"} as in GSM8K, or {"problem", "answer"} or {"problem",
"solution": "… \\\\boxed{…}"} as in MATH and MATH-500.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--heldout", nargs="*", default=[], metavar="NAME=FILE")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        write(arguments.folder / "train.jsonl", [row for file in arguments.train for row in rows(file)])
        for name, _, file in (each.partition("=") for each in arguments.heldout):
            write(arguments.folder / f"{name}.jsonl", list(rows(Path(file))))
    except (OSError, ValueError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    return 0


def rows(path: Path) -> Iterator[dict]:
    """Yield the prompts of a file. Raises ValueError with file and line for a row of neither form."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        given = json.loads(line)
        problem, reference = given.get("question") or given.get("problem"), answer(given)
        if not problem or not reference:
            raise ValueError(f"{path}, line {number}: no problem with an answer; keys are {', '.join(given)}")
        content = {"role": "user", "content": problem}
        yield {"id": f"{path.parent.name}/{path.stem}-{number}", "messages": content, "gt_answer": reference}


def answer(given: dict) -> str:
    """Return the reference answer of a row; empty if it has none."""
    if "question" in given:
        _, mark, last = given.get("answer", "").rpartition("####")
        return last.strip().replace(",", "") if mark else ""
    return given.get("answer") or last_box(given.get("solution", ""))


def last_box(solution: str) -> str:
    """Return the content of the last box of a worked solution; empty without a complete box."""
    _, box, rest = solution.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:place]
    return ""


def write(path: Path, prompts: list[dict]) -> None:
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8")
    print(f"{path}: {len(prompts)} problems", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
