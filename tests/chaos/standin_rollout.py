"""A rollout without a model: it leases prompts, takes completions from `content`, has them scored, and puts the groups.

It misbehaves in ways that the broker must tolerate: it ignores lost leases and puts those groups anyway, and it puts
some groups twice. It exits with status 0 when the run is finished, or on SIGTERM after it released its prompts.
"""

import asyncio
import json
import signal
import sys
from collections import Counter

import content
import grpc
from membership import Membership, emit
from peers import TRANSIENT, Peers
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.durations import to_duration

AT_ONCE = 6  # concurrent prompts
SLOWEST_SECONDS = 0.06  # to generate a group
PUT_AGAIN = 12  # one group in 12 is put twice
LEASE_WAIT_SECONDS = 2.0


class Rollout:
    """The stand-in rollout. `brokers`, `rewards`: host:port of each; `ttl`: of leases and members, in seconds."""

    def __init__(self, name: str, run: str, brokers: list[str], rewards: list[str], ttl: float):
        self.broker = Peers(broker_pb2_grpc.BrokerServiceStub, broker_pb2, brokers, run_id=run)
        self.reward = Peers(reward_pb2_grpc.RewardServiceStub, reward_pb2, rewards)
        self.run_id, self.ttl = run, ttl
        self.member = Membership(self.broker, name, common_pb2.SERVICE_KIND_ROLLOUT, ttl)
        self.held: dict[str, asyncio.Task] = {}
        self.outcomes: Counter[str] = Counter()

    async def live(self) -> None:
        """Work until the run ends or SIGTERM comes."""
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        self.member.me.state = broker_pb2.MEMBER_STATE_ACTIVE
        self.verifiers = (await self.member.join()).spec.verifiers
        works = (self.member.keep(), self.renew(), self.work(), stopping.wait(), self.member.ended.wait())
        tasks = [asyncio.create_task(work) for work in works]
        emit("ready")
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises its error
        for task in tasks:
            task.cancel()
        if not self.member.ended.is_set():
            await self.drain()
        emit("over", **self.outcomes)

    async def work(self) -> None:
        """Lease prompts up to the limit of concurrent ones."""
        while True:
            room = AT_ONCE - len(self.held)
            if room <= 0:
                await asyncio.wait(self.held.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                answer = await self.broker.call(
                    "LeasePrompts",
                    timeout=LEASE_WAIT_SECONDS + 1.0,
                    patience=0.0,  # not retried: the leases of a lost response expire
                    holder=self.member.me.instance_id,
                    max_prompts=room,
                    wait=to_duration(LEASE_WAIT_SECONDS),
                    policy_version=self.member.version,
                )
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    run = await self.member.join()  # its ttl has passed; or the run is finished
                    if run.state != broker_pb2.RUN_STATE_ACTIVE:
                        return
                elif error.code() in TRANSIENT:
                    await asyncio.sleep(0.05)
                else:
                    raise
                continue
            self.member.version = answer.policy_version
            for lease in answer.leases:
                task = asyncio.create_task(self.make(lease))
                self.held[lease.lease_id] = task
                task.add_done_callback(lambda task, lease_id=lease.lease_id: self.finished(lease_id, task))

    def finished(self, lease_id: str, task: asyncio.Task) -> None:
        """Forget a finished prompt; an exception in its task ends the rollout."""
        self.held.pop(lease_id, None)
        if not task.cancelled() and task.exception() is not None:
            emit("fault", what=repr(task.exception()))
            sys.exit(1)

    async def make(self, lease: broker_pb2.PromptLease) -> None:
        instance_id = lease.instance.instance_id
        version = self.member.version
        await asyncio.sleep(SLOWEST_SECONDS * (content.number_of(instance_id) % 100) / 100)
        put = content.group(lease, version, await self.score(lease))
        for _ in range(2 if content.number_of(instance_id, "again ") % PUT_AGAIN == 0 else 1):
            outcome = broker_pb2.PUT_OUTCOME_NO_ROOM
            while outcome == broker_pb2.PUT_OUTCOME_NO_ROOM:
                (outcome,) = (await self.broker.call("PutExperience", groups=[put])).outcomes
            name = broker_pb2.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_").lower()
            self.outcomes[name] += 1
            if name != "accepted":
                emit("put", outcome=name, instance=instance_id)

    async def score(self, lease: broker_pb2.PromptLease) -> list[reward_pb2.Score]:
        prompt = lease.instance.prompt
        items = [
            reward_pb2.ScoreItem(
                item_id=str(index),
                completion=text,
                reference=prompt.reference,
                verifiers=prompt.verifiers or self.verifiers,
                run_id=self.run_id,
            )
            for index, text in enumerate(content.completions(lease.instance))
        ]
        while True:
            results = {result.item_id: result for result in (await self.reward.call("Score", items=items)).results}
            failures = [result.failure for result in results.values() if result.HasField("failure")]
            if not failures:
                return [results[item.item_id].score for item in items]
            if not all(failure.retryable for failure in failures):
                raise RuntimeError(f"no score for '{lease.instance.instance_id}': {failures[0].message}")
            await asyncio.sleep(0.1)

    async def renew(self) -> None:
        """Renew the leases that are held, every third of their ttl."""
        while True:
            await asyncio.sleep(self.ttl / 3)
            try:
                if self.held:
                    await self.broker.call("RenewLeases", timeout=self.ttl / 3, patience=0.0, lease_ids=list(self.held))
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise

    async def drain(self) -> None:
        held = dict(self.held)
        for task in held.values():
            task.cancel()
        releases = [broker_pb2.LeaseRelease(lease_id=lease_id) for lease_id in held]
        try:
            await self.broker.call("ReleaseLeases", timeout=1.0, patience=2.0, releases=releases)
            await self.broker.call("LeaveMember", timeout=1.0, patience=2.0, instance_id=self.member.me.instance_id)
        except grpc.RpcError as error:
            emit("left-without-word", code=error.code().name)  # leases and registration expire


async def main() -> None:
    await Rollout(**json.loads(sys.argv[1])).live()  # created on the event loop, which its channels need


if __name__ == "__main__":
    asyncio.run(main())
