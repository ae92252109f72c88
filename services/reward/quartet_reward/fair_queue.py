"""The name of `queue` in version 0.1, for verifiers written then."""

from quartet_reward.queue import CURRENT_RUN, FairQueue, QueueClosed

__all__ = ["CURRENT_RUN", "FairQueue", "QueueClosed"]
