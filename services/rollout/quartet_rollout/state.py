"""What the parts of the service share: the run, the engine, and word that something changed."""

import asyncio

from quartet.v1 import broker_pb2

from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine
from quartet_rollout.prompts import PromptReader


class Changes:
    """Wakes whoever waits for a change. Check a condition, then wait, with no await between: no change is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
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


class RolloutState:
    """The facts that decide whether prompts may be leased."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        """This rollout's name among the members of a run."""
        self.run_id = ""
        """The run it works for; empty while it has yet to choose one."""
        self.engine: Engine | None = None
        """Set when it is loaded."""
        self.reader: PromptReader | None = None
        """Set with the engine."""
        self.run: broker_pb2.Run | None = None
        """The run as it stood at registration; kept after its end, for the defaults of direct generation."""
        self.active = False
        """True while this rollout is a registered member of a run that is active."""
        self.reward_ready = False
        """True while the reward service's stream is open."""
        self.paused = False
        """True while generation stands still for the installation of new weights."""
        self.updating = False
        """True from the beginning of a weight update to its end."""
        self.sleep_level = 0
        """Level at which the engine sleeps, or is about to; 0: it is awake."""
        self.run_number = 0
        """Counts the runs that it has left: what belongs to an earlier one must not have an effect."""
        self.changing_run = False
        """True from the moment it goes over to another run until nothing of the last one is left."""
        self.draining = False
        """True from the first moment of the end."""
        self.groups_total = 0
        """Groups the broker accepted since the start."""
        self.tokens_per_second = 0.0
        """Generated in the last seconds."""
        self.changes = Changes()

    @property
    def spec(self) -> broker_pb2.RunSpec | None:
        """The run's specification, if the run is known."""
        return self.run.spec if self.run is not None else None

    @property
    def works_for(self) -> str:
        """The run, in words, for whoever means another."""
        return f"this rollout works for run '{self.run_id}'" if self.run_id else "this rollout works for no run yet"

    @property
    def policy_version(self) -> int:
        """Policy version of the engine's weights; -1 while there is no engine or nothing is known of them."""
        return self.engine.policy_version if self.engine is not None else UNKNOWN_VERSION

    @property
    def may_lease(self) -> bool:
        """True if a prompt leased now could be generated and scored."""
        works = self.active and self.reward_ready and not self.draining and not self.sleep_level
        return works and self.policy_version != UNKNOWN_VERSION
