"""How long each operation on a text takes in the reward service as texts grow, against growth in proportion to length.

    .quartet/envs/reward/bin/python benchmarks/texts.py

Prints a table with the CPU milliseconds of each operation for the slowest of `FLOODS`, repeated to 3, 10 and 30 MB. The
figure is the time at 30 MB; the peer is ten times the time at 3 MB.
"""

import time
from collections.abc import Callable

from measuring import Figure, report
from quartet.v1 import reward_pb2

from quartet_reward import answer_extraction
from quartet_reward.begun import Begun
from quartet_reward.code.completion import find_program
from quartet_reward.math import boxes, extract
from quartet_reward.math.extract import answer_in_prose, chosen
from quartet_reward.verifiers.text import Exact, ExactParameters

MEGABYTES = (3, 10, 30)
ROUNDS = 3
FLOODS = (
    *("z", "é", "汉", " ", "\n", "1", "1+", "a b ", "\\", "$", "{", r"\boxed{", r"\boxed{1} "),
    *("``x", "```python\n", "```\n", "'''"),
    *("<|im_end|>", "<answer>", "</answer>", "<think>", "</think>", "The answer is "),
)
ANYWHERE = extract.ANYWHERE


def _exact(text: str) -> object:
    item = reward_pb2.ScoreItem(completion=text, reference=reward_pb2.Reference(answer="1"))
    return Begun(Exact().verify(item, ExactParameters(ignore_case=True), None)).result


OPERATIONS: dict[str, Callable[[str], object]] = {
    "special tokens at the end": answer_extraction.without_trailing_special_tokens,
    "a special token of one letter": lambda text: answer_extraction.without_trailing_special_tokens(text, ["z"]),
    "the form of think and answer": answer_extraction.fault_of_think_answer_form,
    "the last tagged answer": answer_extraction.last_tagged_answer,
    "what follows the thought": answer_extraction.after_thinking,
    "boxes": boxes.joined_boxes,
    "prose": answer_in_prose,
    "the final answer": lambda text: extract.final_answer(text, ANYWHERE),
    "a choice of letters": lambda text: chosen(text, ("A", "B")),
    "the program": find_program,
    "exact, without regard to case": _exact,
}


def milliseconds(operation: Callable[[str], object], text: str) -> float:
    """Return the least CPU time of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        operation(text)
        times.append(time.process_time() - began)
    return 1000 * min(times)


def main() -> None:
    figures = []
    print(f"{'operation':32} {' '.join(f'{size:6} MB' for size in MEGABYTES)}  slowest text")
    for name, operation in OPERATIONS.items():
        slowest = max(FLOODS, key=lambda flood: milliseconds(operation, flood * (1_000_000 // len(flood.encode()))))
        took = [milliseconds(operation, slowest * (size * 1_000_000 // len(slowest.encode()))) for size in MEGABYTES]
        print(f"{name:32} {' '.join(f'{each:9.1f}' for each in took)}  {slowest!r}", flush=True)
        figures.append(Figure(f"texts: {name}", "ms CPU", took[-1], 10 * max(took[0], 0.1), "ten times 3 MB", "lower"))
    report(*figures)


if __name__ == "__main__":
    main()
