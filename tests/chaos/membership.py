"""A stand-in's registration as a member of its run: it sends heartbeats and learns when the run ends."""

import asyncio
import json
import os
import secrets

import grpc
from peers import TRANSIENT, Peers
from quartet.v1 import broker_pb2


def emit(event: str, **facts: object) -> None:
    """Send an event to the harness: a line of JSON on standard output."""
    print(json.dumps({"event": event, **facts}), flush=True)


class Membership:
    """The registration of one process. Run `keep` in the background."""

    def __init__(self, broker: Peers, name: str, kind: int, ttl: float):
        self._broker = broker
        self._ttl = ttl
        self.me = broker_pb2.Member(
            instance_id=f"{name}-{os.getpid()}-{secrets.token_hex(3)}",
            kind=kind,
            address="127.0.0.1:1",
            state=broker_pb2.MEMBER_STATE_JOINING,
        )
        self.version = 0  # the run's policy version in the last response
        self.ended = asyncio.Event()  # the run is finished

    async def join(self) -> broker_pb2.Run:
        """Register; wait for the broker and until the run exists."""
        while True:
            try:
                run = (await self._broker.call("RegisterMember", member=self.me)).run
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(0.2)  # the feeder creates the run
            else:
                self._heard(run.policy_version, run.state)
                return run

    async def keep(self) -> None:
        """Send heartbeats until the run ends; register again after the registration has expired."""
        while not self.ended.is_set():
            await asyncio.sleep(self._ttl / 3)
            await self.beat()

    async def beat(self) -> None:
        """Send one heartbeat."""
        try:
            answer = await self._broker.call("Heartbeat", timeout=self._ttl / 2, patience=0.0, member=self.me)
            self._heard(answer.policy_version, answer.run_state)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                await self.join()
            elif error.code() not in TRANSIENT:
                raise

    def _heard(self, version: int, state: int) -> None:
        self.version = version
        if state != broker_pb2.RUN_STATE_ACTIVE:
            self.ended.set()
