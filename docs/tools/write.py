"""Writes the generated pages of docs/.

.quartet/envs/dev/bin/python docs/tools/write.py            writes them
.quartet/envs/dev/bin/python docs/tools/write.py --check    exits with 1 and names those that are not up to date
"""

import json
import sys
from pathlib import Path

import client_reference
import families
import prometheus
import roles
import run_file
import trl
import verifiers

DOCS = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """Return the contents of all generated files of docs/ by name."""
    schemas = run_file.read_schemas()
    return {
        "run-file.md": run_file.page(schemas),
        "run-file.schema.json": json.dumps(run_file.json_schema(schemas), indent=1, ensure_ascii=False) + "\n",
        "trl.md": trl.page(schemas),
        "models.md": families.page(),
        "commands.md": client_reference.page(),
        "roles.md": roles.page(),
        "verifiers.md": verifiers.page(),
        "prometheus.md": prometheus.page(),
    }


def stale(made: dict[str, str]) -> list[str]:
    """Return the names of the files that are missing or not up to date."""
    return [name for name, text in made.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != text]


def main() -> int:
    made = pages()
    wrong = stale(made)
    if "--check" in sys.argv[1:]:
        if wrong:
            print(f"not up to date: {', '.join(wrong)}; run docs/tools/write.py", file=sys.stderr)
        return 1 if wrong else 0
    for name in wrong:
        (DOCS / name).write_text(made[name])
        print(f"written: docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
