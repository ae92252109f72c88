"""docs/verifiers.md: all built-in verifiers with parameters and examples, from the reward service.

.quartet/envs/reward/bin/python docs/tools/verifiers.py     prints what the page is made of
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path

from escaping import escaped

ROOT = Path(__file__).resolve().parents[2]

HEAD = """\
# Verifiers

The built-in verifiers and their parameters, as `ListVerifiers` returns them. [reward.md](reward.md#verifiers) says how
their rewards combine, and how to [try one](reward.md#trying-a-reward) on rows. This page is made from the code by
`docs/tools/write.py`; the examples (reward and outcome of a completion, and a reference where there is one) are run by
`services/reward/tests/test_verifiers.py`.
"""


def page() -> str:
    """Return the page."""
    import run_file

    python = ROOT / ".quartet" / "envs" / "reward" / "bin" / "python"
    done = subprocess.run([python, __file__], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    parts = [HEAD]
    for name, one in json.loads(done.stdout).items():
        schema = one["schema"]
        parts.append(f"\n## `{name}`\n\n{escaped(one['description'])}\n")
        if schema["properties"]:
            parts.append("\n" + run_file.table(schema, schema.get("$defs", {}), "parameter"))
        if one["examples"]:
            parts.append(f"\n```text\n{one['examples']}```\n")
    return "".join(parts)


def described() -> dict[str, dict[str, object]]:
    """Return description, parameter schema and examples of all verifiers. Runs in the reward service's environment."""
    import doctest

    from quartet_reward.verifiers.registry import load_verifiers

    def examples(verifier: object) -> str:
        found = doctest.DocTestParser().get_examples(inspect.getdoc(type(verifier)) or "")
        return "".join(f"{each.source.strip()}  →  {each.want}" for each in found)

    return {
        name: {
            "description": one.description,
            "schema": one.parameters.model_json_schema(),
            "examples": examples(one),
        }
        for name, one in load_verifiers(points=()).items()
    }


if __name__ == "__main__":
    json.dump(described(), sys.stdout)
