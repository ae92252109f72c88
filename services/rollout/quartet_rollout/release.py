"""How the lease of a group that cannot be finished is given back to the broker."""

from quartet.v1 import broker_pb2

from quartet_common.log import get_logger
from quartet_common.text import encodable, error_text
from quartet_rollout.broker import LARGEST_GROUP, UploadRefused
from quartet_rollout.engines.base import EngineError, PromptError
from quartet_rollout.environments.base import EnvironmentFailed
from quartet_rollout.environments.registry import UnknownEnvironment
from quartet_rollout.generation import PromptRefused
from quartet_rollout.scoring import ScoringFailed

log = get_logger(__name__)

_LONGEST_FAILURE = 2000


class LeaseReleased(Exception):
    """The group cannot be finished in this delivery.

    Args:
        counted: it counts against the prompt (max_deliveries).
        permanent: another delivery would fail too.
        unscored: a serialized UnscoredGroup, if the verifiers failed.
    """

    def __init__(self, reason: str, counted: bool = True, permanent: bool = False, unscored: bytes = b""):
        super().__init__(reason)
        self.counted, self.permanent, self.unscored = counted, permanent, unscored

    @property
    def outcome(self) -> str:
        """Its name in metrics."""
        if self.unscored:
            return "unscored"
        return "refused" if self.permanent else "failed" if self.counted else "given_back"

    def of(self, lease: broker_pb2.PromptLease) -> broker_pb2.LeaseRelease:
        """Return what the broker gets."""
        failure = encodable(str(self), _LONGEST_FAILURE) if self.counted else ""
        release = broker_pb2.LeaseRelease(lease_id=lease.lease_id, failure=failure, permanent=self.permanent)
        if len(self.unscored) > LARGEST_GROUP:
            release.failure += f"; its {len(self.unscored)} bytes of completions are not kept: they fit no message"
        elif self.unscored:
            release.unscored = self.unscored
        return release


def released(error: Exception) -> LeaseReleased:
    """Return how to release the lease after an error. Unexpected errors are logged and count against the prompt, so
    that one prompt cannot stop the service."""
    match error:
        case LeaseReleased():
            return error
        case ScoringFailed():
            return LeaseReleased(str(error), permanent=True)
        case PromptRefused() | PromptError():
            return LeaseReleased(f"prompt cannot be used: {error}", permanent=True)
        case UnknownEnvironment():
            return LeaseReleased(str(error))
        case EnvironmentFailed():
            return LeaseReleased(f"environment: {error}", error.counted, error.permanent)
        case EngineError():
            return LeaseReleased(f"engine: {error}")
        case UploadRefused():
            log.error("a group was refused: %s", error)
            return LeaseReleased(f"put refused: {error}")
        case _:
            log.error("a group failed", exc_info=error)
            return LeaseReleased(f"rollout: {error_text(error)}")
