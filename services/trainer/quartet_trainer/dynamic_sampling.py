"""Dynamic sampling: groups that teach nothing give their place to others (DAPO, Yu et al. 2025, arXiv:2503.14476 §3.2).

A group whose rewards are all equal has advantage 0 everywhere. Such groups are dropped from a batch before it is
trained, and the broker tops the batch up, at most `max_refills` times a step. What is there then is trained as it is.
"""

from collections.abc import Mapping

import numpy as np
from quartet.v1 import experience_pb2

from quartet_common.log import get_logger
from quartet_common.tensors import decode
from quartet_trainer.config import TrainerSection
from quartet_trainer.session import Batch, BrokerSession

log = get_logger(__name__)

REASON = "zero variance"


def without_variance(groups: Mapping[str, experience_pb2.GroupTensors]) -> list[str]:
    """Return the ids of the groups whose rewards are all equal."""
    return [name for name, group in groups.items() if np.ptp(decode(group.rewards)) == 0]


class DynamicSampling:
    """Filters the batches of one trainer, rank 0's; it remembers what one step has cost."""

    def __init__(self, settings: TrainerSection, session: BrokerSession):
        self._enabled = settings.samples_dynamically
        self._most = settings.dynamic_sampling.max_refills
        self._session = session
        self._step = -1
        self._dropped = 0
        self._refills = 0

    def filter(self, step: int, batch: Batch, tensors: Mapping[str, experience_pb2.GroupTensors]) -> bool:
        """Drop what teaches nothing from a batch that was just granted. True: lease the step again, for it is short.

        `tensors`: of its groups, by instance id.

        A batch granted before is left as it is: trained once, it may be trained again after a restart, and must be the
        same. So is the last one of the data: nothing will come to fill it up.
        """
        if step != self._step:
            self._step, self._dropped, self._refills = step, 0, 0
        if not self._enabled or self._refills >= self._most or batch.manifest.replayed or batch.manifest.end_of_data:
            return False
        flat = without_variance(tensors)
        if not flat:
            return False
        self._session.drop(step, flat, REASON)
        self._dropped += len(flat)
        self._refills += 1
        log.info("groups without variance dropped", extra={"step": step, "groups": len(flat), "refill": self._refills})
        return True

    def metrics(self) -> dict[str, float]:
        """Return what the step's batch cost; nothing where there is no dynamic sampling."""
        if not self._enabled:
            return {}
        return {"batch/dropped_groups": float(self._dropped), "batch/refills": float(self._refills)}
