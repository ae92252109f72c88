"""Groups that cannot be trained are dropped when they arrive, each with its reason and its rollout.

If such a group ended the training, the broker would grant it to the restarted trainer, which would end as well.
"""

from collections.abc import Callable

from google.protobuf.message import DecodeError
from quartet.v1 import experience_pb2

from quartet_common import metrics
from quartet_common.log import get_logger
from quartet_common.text import Repeats
from quartet_trainer.batches import ExperienceError
from quartet_trainer.errors import InvalidGroupsError
from quartet_trainer.session import Batch, BrokerSession

log = get_logger(__name__)

_INVALID = metrics.counter(
    "quartet_trainer_invalid_groups_total", "Groups dropped as invalid, by rollout.", ["rollout"]
)
_IN_A_ROW = metrics.gauge(
    "quartet_trainer_invalid_groups_in_a_row", "Invalid groups of a rollout since its last valid one.", ["rollout"]
)


class InvalidGroups:
    """Checks the batches of one trainer; for the fetching thread."""

    def __init__(
        self,
        session: BrokerSession,
        check: Callable[[experience_pb2.GroupTensors], None],
        notice: Callable[[str], None],
        alive: Callable[[str], bool],
        most: int,
    ):
        """Make it.

        Args:
            check: as Learner.check_group.
            notice: shows a warning to people who watch the run.
            alive: whether a rollout is a member of the run.
            most: invalid groups in a row, of all rollouts, after which no valid one is expected; 0: any number.
        """
        self._session = session
        self._check = check
        self._notice = notice
        self._alive = alive
        self._most = most
        self._repeats = Repeats()
        self._since_valid = 0
        self._in_a_row: dict[str, int] = {}  # of each rollout that has metrics
        self._step = -1
        self._valid: dict[str, experience_pb2.GroupTensors] = {}

    def drop(self, step: int, batch: Batch) -> dict[str, experience_pb2.GroupTensors] | None:
        """Return the tensors of a batch by instance id, in its order; None: groups were dropped, lease the step again.

        A batch that was granted before is checked too: if a group of it is invalid, it was never trained.

        Raises:
            InvalidGroupsError: the last `most` groups were all invalid.
        """
        if step != self._step:
            self._step, self._valid = step, {}
        dropped = False
        for group in batch.groups:
            name = group.header.instance_id
            if name in self._valid:  # counted when the batch was short of others
                continue
            try:
                self._valid[name] = self._decode(group)
                self._since_valid = 0
            except (DecodeError, ExperienceError) as error:
                dropped = True
                self._drop(step, name, str(error))
        if dropped:
            return None
        return {group.header.instance_id: self._valid[group.header.instance_id] for group in batch.groups}

    def forget_gone(self) -> None:
        """Remove the metrics of rollouts that have left the run."""
        for rollout in [name for name in self._in_a_row if not self._alive(name)]:
            del self._in_a_row[rollout]
            for metric in (_INVALID, _IN_A_ROW):
                metric.remove_by_labels({"rollout": rollout})

    def _decode(self, group: experience_pb2.ExperienceGroup) -> experience_pb2.GroupTensors:
        tensors = experience_pb2.GroupTensors.FromString(group.tensors)
        self._check(tensors)
        transcript = experience_pb2.GroupTranscript.FromString(group.transcript)
        if any(self._in_a_row.values()):
            rollout = transcript.rollout_id or self._session.rollout_of(group.header.instance_id)
            if self._in_a_row.get(rollout):
                self._in_a_row[rollout] = 0
                _IN_A_ROW.labels(rollout).set(0)
        return tensors

    def _drop(self, step: int, name: str, reason: str) -> None:
        rollout = self._session.rollout_of(name)
        self._session.drop(step, [name], f"invalid group of {rollout}: {reason}")
        _INVALID.labels(rollout).inc()
        self._in_a_row[rollout] = self._in_a_row.get(rollout, 0) + 1
        self._since_valid += 1
        _IN_A_ROW.labels(rollout).set(self._in_a_row[rollout])
        since = self._repeats.count(rollout)
        if since is not None:
            more = f" ({since} more of this rollout since the last such line)" if since else ""
            warning = f"group '{name}' of rollout '{rollout}' cannot be trained and is dropped: {reason}{more}"
            log.warning(warning, extra={"step": step})
            self._notice(warning)
        if 0 < self._most <= self._since_valid:
            raise InvalidGroupsError(
                f"the last {self._since_valid} groups cannot be trained (trainer.max_invalid_groups); the last of "
                f"them, of rollout '{rollout}': {reason}"
            )
