"""A stand-in's place among the members of its run: registered, kept alive, told when the run ends."""

import asyncio
import json
import os
import secrets

import grpc
from peers import TRANSIENT, Peers
from quartet.v1 import broker_pb2


def tell(event: str, **facts: object) -> None:
    """Tell the harness, which reads standard output line by line."""
    print(json.dumps({"event": event, **facts}), flush=True)


class Membership:
    """One life of a stand-in as a member. Run `keep` in the background."""

    def __init__(self, broker: Peers, name: str, kind: int, ttl: float):
        self._broker = broker
        self._ttl = ttl
        self.me = broker_pb2.Member(
            instance_id=f"{name}-{os.getpid()}-{secrets.token_hex(3)}",
            kind=kind,
            address="127.0.0.1:1",
            state=broker_pb2.MEMBER_STATE_JOINING,
        )
        self.version = 0  # newest policy version of the run, as last heard
        self.ended = asyncio.Event()  # the run is finished

    async def join(self) -> broker_pb2.Run:
        """Register, waiting for the broker and for the run."""
        while True:
            try:
                run = (await self._broker.call("RegisterMember", member=self.me)).run
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
                await asyncio.sleep(0.2)  # the feeder makes the run
            else:
                self._heard(run.policy_version, run.state)
                return run

    async def keep(self) -> None:
        """Send heartbeats until the run ends; register again when they came too late."""
        while not self.ended.is_set():
            await asyncio.sleep(self._ttl / 3)
            await self.beat()

    async def beat(self) -> None:
        """Send one heartbeat, now."""
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
