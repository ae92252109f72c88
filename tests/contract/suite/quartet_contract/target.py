"""Somebody's server, as the cases see it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from quartet.v1 import broker_pb2, common_pb2, experience_pb2, tensor_pb2, trainer_pb2
from quartet.v1 import rollout_pb2 as rollout

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection
from quartet_common.tensors import encode, encode_ragged
from quartet_contract.calls import OWNERS, Caller
from quartet_contract.cases import Bad, Case, Good, NoBadInput, Tried
from quartet_contract.world import BrokerRun, NotHere, World

TRAINED_SECONDS = 120.0


@dataclass(frozen=True)
class Target:
    """What is tested.

    Attributes:
        kind: "broker", "reward", "environment", "rollout" or "trainer".
        address: where it listens, host:port.
        security: TLS and token of the calls.
        broker: of a trainer: where its broker listens.
        run_id: of a trainer: the run it is to train.
        end_token: of a rollout: the token that ends its model's completions.
        ends: also the call that ends the service.
    """

    kind: str
    address: str
    security: SecuritySection = SecuritySection()
    broker: str = ""
    run_id: str = "contract-trained"
    end_token: int = 0
    ends: bool = False

    def cases(self, every: list[Case]) -> list[Tried]:
        """Return those of its services that make a call; what ends the service comes last."""
        services = (OWNERS[self.kind], "HandshakeService")
        chosen = [case for case in every if case.rpc.startswith(services) and not isinstance(case, NoBadInput)]
        return sorted(chosen, key=lambda case: isinstance(case, Good) and case.last)


class Bench:
    """Channels to a target, kept for all cases."""

    def __init__(self, target: Target):
        self.target = target
        self._caller = _secure_caller(target.kind, target.address, target.security)
        self._broker = _secure_caller("broker", target.broker, target.security) if target.broker else None
        self._trained = False

    def handshake(self) -> common_pb2.HandshakeResponse:
        """Return what the target says of itself. Raises grpc.RpcError, and NotHere if it is another service."""
        answer = self._caller.call("HandshakeService.Handshake", common_pb2.HandshakeRequest(), timeout=10)
        kind = common_pb2.ServiceKind.Name(answer.service).removeprefix("SERVICE_KIND_").lower()
        if kind != self.target.kind:
            raise NotHere(f"at {self.target.address} answers a {kind}, not a {self.target.kind}")
        return answer

    @contextmanager
    def world(self, case: Tried) -> Iterator[World]:
        """A world for one case; what the case made at a broker is deleted behind it. Raises NotHere."""
        if isinstance(case, Good) and case.last and not self.target.ends:
            raise NotHere("it ends the service; --ends has it called, after all others")
        if isinstance(case, Bad) and case.server:
            raise NotHere(f"it needs an {case.server} beside the one under test")
        callers = {OWNERS[self.target.kind]: self._caller, "HandshakeService": self._caller}
        if self.target.kind == "trainer" and not case.rpc.startswith("HandshakeService"):
            self._have_trained()
        world = World(callers)
        if self.target.kind == "rollout":
            side = NoWeightSide(self._caller)
            world = World(callers, side, context=side.status().max_model_len, end_token=self.target.end_token)
        try:
            yield world
        finally:
            if self.target.kind == "broker":
                self._forget(world.name)

    def close(self) -> None:
        """Close the channels."""
        self._caller.close()
        if self._broker is not None:
            self._broker.close()

    def _forget(self, run_id: str) -> None:
        try:
            self._caller.call("BrokerService.DeleteRun", broker_pb2.DeleteRunRequest(run_id=run_id, force=True))
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                raise

    def _have_trained(self) -> None:
        """Give the trainer one step to train, if it has trained none, and wait until it has."""
        if self._trained:
            return
        if not self._trained_one_step():
            self._put_one_step()
        deadline = time.monotonic() + TRAINED_SECONDS
        while not self._trained_one_step():
            assert time.monotonic() < deadline, f"the trainer has not trained one step of run '{self.target.run_id}'"
            time.sleep(0.2)
        self._trained = True

    def _trained_one_step(self) -> bool:
        status = self._caller.call("TrainerService.GetStatus", trainer_pb2.TrainerServiceGetStatusRequest())
        if status.step > 1:
            raise NotHere(f"the trainer has trained {status.step} steps; the cases are of one that has trained one")
        return status.step == 1 and status.phase == trainer_pb2.TRAINER_PHASE_WAITING_FOR_BATCH

    def _put_one_step(self) -> None:
        if self._broker is None:
            raise NotHere("the trainer needs a step to train: name its broker with --broker")
        run_id = self.target.run_id
        run = BrokerRun(World({"BrokerService": self._broker}), run_id, groups_per_step=1)
        run.put(run.submit("a").lease(1), tensors=group_tensors().SerializeToString())
        run.call("LeaveMember", broker_pb2.LeaveMemberRequest(run_id=run_id, instance_id="r1"))


class NoWeightSide:
    """Stands for the trainer's side of weight updates where there is none: what needs it is not tried."""

    def __init__(self, caller: Caller):
        self._caller = caller

    @property
    def engine(self) -> str:
        """The rollout's engine, by its own word."""
        status = self.status()
        if status.run_id:
            raise NotHere(f"the rollout is in run '{status.run_id}'; the case is of one whose run does not exist")
        return status.engine

    def ensure(self, w: World) -> None:
        """Raise NotHere if the rollout has no weights to generate with."""
        if self.status().policy_version < 0:
            raise NotHere("the rollout has no weights of a known version: test one that is in a run")

    def status(self) -> Any:
        """Return what the rollout says of itself."""
        return self._caller.call("RolloutService.GetStatus", rollout.RolloutServiceGetStatusRequest())

    def __getattr__(self, name: str) -> Any:
        raise NotHere(
            "it needs the trainer's side of a weight group: tests/contract of a checkout has one "
            "(QUARTET_CONTRACT_ROLLOUT, docs/compatibility.md)"
        )


def group_tensors() -> experience_pb2.GroupTensors:
    """Return two completions of three tokens, one right and one wrong: what a trainer may be given."""
    ones = encode(np.ones(2, dtype=np.float32))
    tokens = [np.array(row, dtype=np.int32) for row in ([30, 31, 32], [40, 41, 42])]
    half = encode(np.array([0.0, 1.0], dtype=np.float32))
    return experience_pb2.GroupTensors(
        prompt_token_ids=encode(np.array([17, 18, 19], dtype=np.int32)),
        completion_token_ids=encode_ragged(tokens, tensor_pb2.DTYPE_INT32),
        rollout_log_probs=encode_ragged([np.full(3, -4.8, dtype=np.float32)] * 2, tensor_pb2.DTYPE_FLOAT32),
        rewards=half,
        temperatures=ones,
        truncated=encode(np.zeros(2, dtype=np.uint8)),
        version_spans=encode_ragged([np.array([0, 0, 3], dtype=np.int64)] * 2, tensor_pb2.DTYPE_INT64),
        format_acc=ones,
        ans_acc=half,
    )


def _secure_caller(kind: str, address: str, security: SecuritySection) -> Caller:
    return Caller(address, channel=connect_sync(address, security, service=kind))
