"""A rollout without a model: leases prompts, says what `content` makes of them, has it scored, puts the groups.

It is a bad rollout in what the broker must bear: it renews its leases, but goes on with a group whose lease was lost
and puts it all the same; and every so often it puts a group again that was answered already. It ends with status 0 when
the run is finished, or on SIGTERM, after it gave its prompts back.
"""

import argparse
import asyncio
import signal
import sys
from collections import Counter

import content
import grpc
from membership import Membership, tell
from peers import TRANSIENT, Peers
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.durations import to_duration

AT_ONCE = 6  # prompts under way
SLOWEST_SECONDS = 0.06  # to generate a group
PUT_AGAIN = 12  # one group in so many
LEASE_WAIT_SECONDS = 2.0


class Rollout:
    """One life."""

    def __init__(self, arguments: argparse.Namespace):
        self.broker = Peers(broker_pb2_grpc.BrokerServiceStub, arguments.broker)
        self.reward = Peers(reward_pb2_grpc.RewardServiceStub, arguments.reward)
        self.run_id = arguments.run
        self.lease_ttl = arguments.lease_ttl
        kind = common_pb2.SERVICE_KIND_ROLLOUT
        self.member = Membership(self.broker, self.run_id, arguments.name, kind, arguments.member_ttl)
        self.held: dict[str, asyncio.Task] = {}
        self.stopping = asyncio.Event()
        self.outcomes: Counter[str] = Counter()

    async def live(self) -> None:
        """Work until the run ends or SIGTERM comes."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stopping.set)
        self.member.me.state = broker_pb2.MEMBER_STATE_ACTIVE
        run = await self.member.join()
        self.verifiers = run.spec.verifiers
        background = [asyncio.create_task(work) for work in (self.member.keep(), self.renew(), self.work())]
        tell("ready")
        ends = [asyncio.create_task(event.wait()) for event in (self.stopping, self.member.ended)]
        done, _ = await asyncio.wait([*background, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it, if that was a fault
        for task in (*background, *ends):
            task.cancel()
        if not self.member.ended.is_set():
            await self.drain()
        tell("over", **self.outcomes)

    async def work(self) -> None:
        """Lease prompts, as many as there is room for."""
        while True:
            room = AT_ONCE - len(self.held)
            if room <= 0:
                await asyncio.wait(self.held.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            request = broker_pb2.LeasePromptsRequest(
                run_id=self.run_id,
                holder=self.member.me.instance_id,
                max_prompts=room,
                wait=to_duration(LEASE_WAIT_SECONDS),
                policy_version=self.member.version,
            )
            try:
                # Not safe to repeat: the leases of a lost answer expire.
                answer = await self.broker.ask(
                    lambda stub, request=request: stub.LeasePrompts(request, timeout=LEASE_WAIT_SECONDS + 1.0)
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
        """A prompt's work ended; a fault in it ends the rollout."""
        self.held.pop(lease_id, None)
        if not task.cancelled() and task.exception() is not None:
            tell("fault", what=repr(task.exception()))
            sys.exit(1)

    async def make(self, lease: broker_pb2.PromptLease) -> None:
        """Make one group and put it."""
        instance_id = lease.instance.instance_id
        version = self.member.version
        await asyncio.sleep(SLOWEST_SECONDS * (content.number_of(instance_id) % 100) / 100)
        scores = await self.score(lease)
        group = content.group(lease, version, scores, self.member.me.instance_id)
        request = broker_pb2.PutExperienceRequest(
            run_id=self.run_id, groups=[broker_pb2.PutGroup(lease_id=lease.lease_id, group=group)]
        )
        times = 2 if content.number_of(instance_id, "again ") % PUT_AGAIN == 0 else 1
        for _ in range(times):
            outcome = broker_pb2.PUT_OUTCOME_NO_ROOM
            while outcome == broker_pb2.PUT_OUTCOME_NO_ROOM:
                (outcome,) = (await self.broker.unary("PutExperience", request)).outcomes
            name = broker_pb2.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_").lower()
            self.outcomes[name] += 1
            if name != "accepted":
                tell("put", outcome=name, instance=instance_id)

    async def score(self, lease: broker_pb2.PromptLease) -> list[reward_pb2.Score]:
        """Ask a reward service, as long as it takes."""
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
            answer = await self.reward.unary("Score", reward_pb2.ScoreRequest(items=items))
            results = {result.item_id: result for result in answer.results}
            failures = [result.failure for result in answer.results if result.HasField("failure")]
            if not failures:
                return [results[item.item_id].score for item in items]
            if not all(failure.retryable for failure in failures):
                raise RuntimeError(f"no score for '{lease.instance.instance_id}': {failures[0].message}")
            await asyncio.sleep(0.1)

    async def renew(self) -> None:
        """Renew the leases that are held, every third of their ttl."""
        while True:
            await asyncio.sleep(self.lease_ttl / 3)
            if not self.held:
                continue
            request = broker_pb2.RenewLeasesRequest(run_id=self.run_id, lease_ids=list(self.held))
            try:
                await self.broker.ask(
                    lambda stub, request=request: stub.RenewLeases(request, timeout=self.lease_ttl / 3)
                )
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise

    async def drain(self) -> None:
        """Give the prompts back and leave."""
        held = dict(self.held)
        for task in held.values():
            task.cancel()
        releases = [broker_pb2.LeaseRelease(lease_id=lease_id) for lease_id in held]
        release = broker_pb2.ReleaseLeasesRequest(run_id=self.run_id, releases=releases)
        leave = broker_pb2.LeaveMemberRequest(run_id=self.run_id, instance_id=self.member.me.instance_id)
        try:
            await self.broker.insist(lambda stub: stub.ReleaseLeases(release, timeout=1.0), patience=2.0)
            await self.broker.insist(lambda stub: stub.LeaveMember(leave, timeout=1.0), patience=2.0)
        except grpc.RpcError as error:
            tell("left-without-word", code=error.code().name)  # the ttls see to it


async def live(arguments: argparse.Namespace) -> None:
    """Live one life, on the loop that its channels belong to."""
    await Rollout(arguments).live()


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description="A rollout without a model.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--broker", nargs="+", required=True, help="host:port of each broker")
    parser.add_argument("--reward", nargs="+", required=True, help="host:port of each reward service")
    parser.add_argument("--lease-ttl", type=float, required=True)
    parser.add_argument("--member-ttl", type=float, required=True)
    asyncio.run(live(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
