"""A step's metrics that do not come from the learner. docs/metrics.md defines each name."""

from collections.abc import Mapping, Sequence

import numpy as np
from quartet.v1 import experience_pb2

from quartet_common.tensors import decode, decode_ragged
from quartet_common.verifier_scores import verifier_metrics
from quartet_trainer.weight_sync.publisher import Published


def batch_metrics(
    step: int,
    groups: Sequence[experience_pb2.GroupTensors],
    headers: Sequence[experience_pb2.GroupHeader],
) -> dict[str, float]:
    """Return the staleness, temperature, redeliveries and verifiers' means of the batch of `step`."""
    stale = np.array([step - header.min_policy_version for header in headers])
    temperatures = np.concatenate([decode(group.temperatures) for group in groups])
    spans = [row.reshape(-1, 3) for group in groups for row in decode_ragged(group.version_spans)]
    return {
        "staleness/mean": float(stale.mean()),
        "staleness/max": float(stale.max()),
        "staleness/token_mean": _token_staleness(step, spans),
        "staleness/mixed_ratio": float(np.mean([len(row) > 1 for row in spans])) if spans else 0.0,
        "completions/temperature": float(temperatures.mean()) if temperatures.size else 0.0,
        "batch/redelivered_groups": float(sum(header.attempt > 1 for header in headers)),
        **verifier_metrics(mean for header in headers for mean in header.verifiers),
        **_source_metrics(headers),
    }


def _source_metrics(headers: Sequence[experience_pb2.GroupHeader]) -> dict[str, float]:
    """Return each source's share of the groups, its mean reward and, where answers were judged, its mean accuracy."""
    metrics: dict[str, float] = {}
    for name in sorted({header.source for header in headers} - {""}):
        own = [header for header in headers if header.source == name]
        judged = [header.ans_acc for header in own if header.completions > header.unjudged]
        metrics[f"source/{name}/share"] = len(own) / len(headers)
        metrics[f"source/{name}/reward"] = float(np.mean([header.reward_mean for header in own]))
        if judged:
            metrics[f"source/{name}/ans_acc"] = float(np.mean(judged))
    return metrics


def _token_staleness(step: int, spans: Sequence[np.ndarray]) -> float:
    """`spans`: of each completion, int64 [spans, 3] of (version, begin, end)."""
    every = np.concatenate([np.zeros((0, 3), np.int64), *spans])
    tokens = every[:, 2] - every[:, 1]
    return float(((step - every[:, 0]) * tokens).sum() / max(1, tokens.sum()))


def time_metrics(
    before: Mapping[str, float], after: Mapping[str, float], completion_tokens: float, completions: float
) -> dict[str, float]:
    """Return seconds per phase between two readings of `Status.phase_seconds`, the idle fraction and throughput.

    Idle is the time that the trainer waits for a batch, or for weights to be sent.
    """
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    total = sum(spent.values())
    metrics = {f"time/{name}": seconds for name, seconds in spent.items() if seconds > 0}
    metrics["time/step"] = total
    idle = spent.get("waiting_for_batch", 0.0) + spent.get("publishing", 0.0)
    metrics["time/idle_fraction"] = idle / total if total else 0.0
    metrics["throughput/tokens_per_second"] = completion_tokens / total if total else 0.0
    metrics["throughput/completions_per_second"] = completions / total if total else 0.0
    return metrics


def device_metrics(learned: Mapping[str, float], parameters: int, ranks: int, peak_tflops: float) -> dict[str, float]:
    """Return tokens per second of one rank while a step is trained, and the model FLOPs utilization (PaLM, Chowdhery et
    al. 2022, arXiv:2204.02311, appendix B, without the attention's part): 6 · parameters · tokens / (seconds · peak).

    Args:
        learned: the learner's metrics by their public names.
        parameters: of the model, without embeddings.
        ranks: devices that train.
        peak_tflops: of one device; 0: the utilization is left out.
    """
    tokens, seconds = learned["batch/forward_tokens"], learned["time/train_step"]
    if not seconds:
        return {}
    rate = tokens / seconds / ranks
    used = {"throughput/mfu": 6 * parameters * rate / (peak_tflops * 1e12)} if peak_tflops else {}
    return {"throughput/trained_tokens_per_second_per_device": rate, **used}


def update_metrics(updates: Sequence[Published]) -> dict[str, float]:
    """Return the totals of the weight updates that ended since the last step's report."""
    metrics = {"weights/rollouts": float(updates[-1].rollouts if updates else 0)}
    if updates:
        metrics["weights/version"] = float(updates[-1].version)
        metrics["weights/seconds"] = sum(update.elapsed for update in updates)
        metrics["weights/bytes"] = float(sum(update.bytes for update in updates))
        metrics["weights/failures"] = float(sum(len(update.failures) for update in updates))
    return metrics
