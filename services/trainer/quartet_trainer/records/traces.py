"""Traces of groups: their optimizer step, and the publishing of its weights."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quartet.v1 import experience_pb2

from quartet_common import tracing

# Steps kept whose weights have not been published yet; without rollouts none are.
_MOST_STEPS = 64


class GroupTraces:
    """Records spans, from the loop's thread. Does nothing unless [tracing] is configured."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._trained: deque[tuple[int, list[str]]] = deque(maxlen=_MOST_STEPS)

    @contextmanager
    def step(self, step: int, groups: Sequence[experience_pb2.ExperienceGroup]) -> Iterator[None]:
        """Trace an optimizer step: as its own trace, linked to its groups, and as a span in each group's trace."""
        if not tracing.enabled():
            yield
            return
        contexts = [group.header.traceparent for group in groups if group.header.traceparent]
        attributes: dict[str, tracing.Value] = {
            "quartet.run": self._run_id,
            "quartet.step": step,
            "quartet.policy_version": step + 1,
            "quartet.groups": len(groups),
        }
        began = time.time()
        with tracing.span("train step", root=True, links=contexts, attributes=attributes) as span:
            yield
        for context in contexts:
            links = [span.traceparent] if span.traceparent else []
            tracing.record("optimizer step", context, began, links=links, kind="consumer", attributes=attributes)
        self._trained.append((step + 1, contexts))

    def published(self, version: int, rollouts: int, elapsed: float) -> None:
        """Add a span for the update to `version`, which took `elapsed` seconds, to the traces of the groups trained up
        to it."""
        began = time.time() - elapsed
        while self._trained and self._trained[0][0] <= version:
            trained, contexts = self._trained.popleft()
            attributes: dict[str, tracing.Value] = {
                "quartet.run": self._run_id,
                "quartet.policy_version": version,
                "quartet.trained_version": trained,
                "quartet.rollouts": rollouts,
            }
            for context in contexts:
                tracing.record("weights published", context, began, attributes=attributes)
