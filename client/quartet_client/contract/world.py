"""What a case is written in: the servers, a name of its own, and how to arrange a state by calls alone."""

import itertools
import secrets
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message

from quartet_client.contract.broker_arrangements import BrokerRun
from quartet_client.contract.calls import SECONDS, Caller

_SERIAL = itertools.count(1)


class NotHere(Exception):
    """The case needs what these servers do not have; the text is one sentence about it."""


class World:
    """One case's view of the servers under test."""

    def __init__(self, callers: dict[str, Caller], weights: Any = None, context: int = 256, end_token: int = 0):
        """`callers` by service ("BrokerService") or by the name of a special server ("idle trainer").

        `weights`: the trainer's side of weight updates to the rollout, as tests/contract/weight_arrangements.py has it,
        or target.NoWeightSide. `context`, `end_token`: of the rollout's model; those of the demo's.
        """
        self._callers = callers
        self._weights = weights
        self.name = f"case-{next(_SERIAL)}-{secrets.token_hex(3)}"
        """Unique: a run id, an instance id, …"""
        self.context, self.end_token = context, end_token
        self.kept = SimpleNamespace()
        """What building the request leaves for checking the answer."""

    def call(
        self, rpc: str, request: Message | list[Message], server: str = "", take: int = 0, timeout: float = SECONDS
    ):
        """Call an RPC of the usual server of its service, or of another one."""
        return self._callers[server or rpc.partition(".")[0]].call(rpc, request, take, timeout)

    def run(self, **spec) -> BrokerRun:
        """Return a run of this case's own, made now, with one registered rollout "r1"; `spec`: fields of RunSpec."""
        return BrokerRun(self, self.name, **spec)

    @property
    def weights(self) -> Any:
        """The trainer's side of weight updates to the rollout under test."""
        assert self._weights is not None, "this case does not call a rollout"
        return self._weights
