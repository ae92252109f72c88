"""`make agreement DATA=folder`: compares the verifiers' verdicts with known ones.

    python -m tests.agreement.run DATA        (from the checkout's root, in the reward environment)

Each part prints a table for its files in DATA, or that they are missing. Exit status 1: a requirement is not met; 2:
DATA has no known file. docs/math.md and docs/code.md list the files.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tests.agreement.rows import Row

PARTS = ("math", "code")


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description="Agreement of the verifiers with reference answers.")
    parser.add_argument("data", type=Path, help="the folder of the evaluation data")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"DATA: there is no folder '{arguments.data}'; give one that holds evaluation data")
    rows: list[Row] = []
    for part in PARTS:
        measured = list(importlib.import_module(f"tests.agreement.{part}").measure(arguments.data))
        if not measured:
            print(f"{part}: {arguments.data} holds none of its data")
        print_table(measured)
        rows += measured
    missed = [row.name for row in rows if not row.passed]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0 if rows else 2


def print_table(rows: list[Row]) -> None:
    """Print the rows, then each one's notes."""
    if not rows:
        return
    width = max(len(row.name) for row in rows)
    print(f"\n{'what':{width}}  {'agreed':>13}  {'':6}  bar")
    for row in rows:
        print(
            f"{row.name:{width}}  {row.agreed:>6} /{row.total:>5}  {'ok' if row.passed else 'MISSED':6}  {row.bar}",
            flush=True,
        )
    for row in rows:
        if row.notes:
            print(f"\n{row.name}:")
            print("\n".join(f"  - {note}" for note in row.notes), flush=True)


if __name__ == "__main__":
    sys.exit(main())
