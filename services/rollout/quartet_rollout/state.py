"""State shared by the parts of the service: the run, the engine, and an event for changes."""

import asyncio
from enum import Enum

from quartet.v1 import broker_pb2

from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine
from quartet_rollout.prompts import PromptReader


class Changes:
    """Wakes all waiters on a change. To miss none, check a condition and then `wait`, without an await in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for the next `notify`, at most `timeout` seconds; return either way."""
        event = self._event
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return


class DrainStage(Enum):
    """How far a drain is."""

    NONE = "it works"
    FINISHING = "it leases nothing, and finishes its groups"
    LEAVING = "it gives back the others, and leaves the run"
    OUT = "it is in no run until the drain is ended"


class RolloutState:
    """State of one rollout."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        """This rollout's name among the members of a run."""
        self.run_id = ""
        """The run it works for; empty before it has chosen one."""
        self.engine: Engine | None = None
        """Set when the model is loaded."""
        self.reader: PromptReader | None = None
        """Set with the engine."""
        self.run: broker_pb2.Run | None = None
        """The run as of registration; kept after its end, for the defaults of direct generation."""
        self.active = False
        """True while this rollout is a registered member of a run that is active."""
        self.reward_ready = False
        """True while the reward service's stream is open."""
        self.paused = False
        """True while generation is paused for the installation of new weights."""
        self.updating = False
        """True during a weight update."""
        self.sleep_level = 0
        """Level at which the engine sleeps, or will at the end of a call in progress; 0: awake."""
        self.run_number = 0
        """Number of runs that it has left. A call compares it after waiting, to detect a switch of runs."""
        self.changing_run = False
        """True while it switches to another run, until all work for the last one has ended."""
        self.draining = False
        """True from the beginning of the shutdown."""
        self.drain = DrainStage.NONE
        self.groups_total = 0
        """Groups the broker accepted since the start."""
        self.tokens_per_second = 0.0
        """Tokens generated per second, smoothed over the last seconds."""
        self.changes = Changes()
        """Notified after changes of this state, of the load, and of admission."""

    @property
    def spec(self) -> broker_pb2.RunSpec | None:
        """The run's specification, if the run is known."""
        return self.run.spec if self.run is not None else None

    @property
    def works_for(self) -> str:
        """The run, as a clause for errors about calls for another run."""
        return f"this rollout works for run '{self.run_id}'" if self.run_id else "this rollout works for no run yet"

    @property
    def policy_version(self) -> int:
        """Policy version of the engine's weights; -1 if unknown, or while the engine is loading."""
        return self.engine.policy_version if self.engine is not None else UNKNOWN_VERSION

    @property
    def may_lease(self) -> bool:
        """True if a prompt leased now could be generated and scored."""
        works = self.active and self.reward_ready and not self.draining and not self.sleep_level
        return works and self.drain is DrainStage.NONE and self.policy_version != UNKNOWN_VERSION
