"""`make agreement DATA=folder`: what the verifiers decide, against what is known to be right.

    python -m tests.agreement.run DATA        (from the checkout's root, in the reward environment)

Each part measures what its data allows and prints a table; a part whose data is not in DATA says so. Exits 1 when a bar
is missed, 2 when there was nothing to measure. The files that DATA may hold are named in docs/math.md and docs/code.md.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tests.agreement.rows import Row

PARTS = ("math", "code")


def main() -> int:
    """Measure, print, and say by the exit status whether all bars were met."""
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
