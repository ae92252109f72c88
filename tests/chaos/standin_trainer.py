"""A trainer without a model: it calls the broker as the real one does, and writes checkpoints and a ledger.

Two of them serve one run. The one that sees no other active trainer restores the newest checkpoint, opens a session and
trains; the other waits. One that resumes after SIGSTOP continues to act as the trainer: the broker must fence it.

Its weights are a digest of all batches, so a check can tell what was trained. It exits with status 0 when the run is
finished; any other status is a fault that the chaos run reports.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import content
import grpc
from checkpoint_folder import CheckpointFolder, State
from membership import Membership, emit
from peers import Peers
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2

from quartet_common.durations import to_duration
from quartet_common.errors import describe
from quartet_common.ledger import LEDGER_FILE, LedgerError, settlement

CHECKPOINT_EVERY = 2
TRAIN_SECONDS = 0.01
LEASE_WAIT_SECONDS = 2.0
PATIENCE = 10  # attempts to restore while another trainer changes its folder


class Fenced(Exception):
    """The broker rejected the session; the text is its reason."""


class Trainer:
    """The stand-in trainer.

    Args:
        brokers: host:port of each.
        folder, others: its own checkpoints, and those of other trainers.
        trap, pace: files with the point at which to die, and with the number of steps that may be trained.
        ttl: of members, in seconds.
        control: a protection to omit, which the audit must detect: "commit-without-checkpoint" or
            "settle-without-instances".
    """

    def __init__(self, name: str, run: str, brokers: list[str], ttl: float, control: str, **files: Any):
        self.broker = Peers(broker_pb2_grpc.BrokerServiceStub, broker_pb2, brokers, run_id=run)
        self.run_id, self.control = run, control
        self.folder, self.trap, self.pace = (Path(files[name]) for name in ("folder", "trap", "pace"))
        self.others = [Path(folder) for folder in files["others"]]
        self.member = Membership(self.broker, name, common_pb2.SERVICE_KIND_TRAINER, ttl)
        self.session = 0

    async def live(self) -> None:
        """Train whenever no other trainer does, until the run ends."""
        run = await self.member.join()
        disk = CheckpointFolder(self.folder, self.run_id, run.created_at.ToJsonString())
        beating = asyncio.create_task(self.member.keep())
        emit("ready")
        while not self.member.ended.is_set():
            if beating.done():
                beating.result()  # raises its error
            await self.until_vacant()
            if self.member.ended.is_set():
                break
            try:
                await self.lead(disk)
            except Fenced as refusal:
                emit("fenced", reason=str(refusal))
            self.member.me.state = broker_pb2.MEMBER_STATE_JOINING
            await self.member.beat()
        emit("over")

    async def until_vacant(self) -> None:
        """Wait until no other trainer is active, or the run ends."""

        async def watch(stub) -> None:
            async for view in stub.WatchMembers(self.broker.request("WatchMembers"), timeout=5.0):
                if not any(self.is_rival(member) for member in view.members):
                    return

        vacant = asyncio.create_task(self.broker.call_with_retry(watch))
        ended = asyncio.create_task(self.member.ended.wait())
        await asyncio.wait((vacant, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if vacant.done():
            vacant.result()
        vacant.cancel()

    def is_rival(self, member: broker_pb2.Member) -> bool:
        is_trainer = member.kind == common_pb2.SERVICE_KIND_TRAINER
        active = member.state == broker_pb2.MEMBER_STATE_ACTIVE
        return is_trainer and active and member.instance_id != self.member.me.instance_id

    async def lead(self, disk: CheckpointFolder) -> None:
        """Train from the newest checkpoint to the end of the data. Raises Fenced."""
        state = await self.open(disk)
        self.member.me.state = broker_pb2.MEMBER_STATE_ACTIVE
        await self.member.beat()
        while True:
            while state.step >= int(self.pace.read_text()):
                await asyncio.sleep(0.05)  # wait for the next fault
            manifest = await self.take(state.step)
            if manifest.run_finished:
                self.member.ended.set()
                return
            if not manifest.granted and manifest.end_of_data:
                break
            if not manifest.granted:
                continue
            self.at("leased")
            await asyncio.sleep(TRAIN_SECONDS)
            instance_ids = list(manifest.instance_ids)
            state.weights = content.train(state.weights, instance_ids)
            disk.ledger.append(state.step, instance_ids)
            self.at("trained")
            await self.say("MarkTrained", session_epoch=self.session, step=state.step, instance_ids=instance_ids)
            state.step += 1
            self.at("marked")
            if self.control == "commit-without-checkpoint":
                await self.commit(state, "committed-unsaved")
            if state.step % CHECKPOINT_EVERY == 0:
                await self.save(disk, state)
        if state.step % CHECKPOINT_EVERY:
            await self.save(disk, state)
        end = {"state": broker_pb2.RUN_STATE_SUCCEEDED, "reason": "all done"}
        await self.say("FinishRun", committed_step=state.step, **end)
        emit("finished", step=state.step)
        self.member.ended.set()

    async def open(self, disk: CheckpointFolder) -> State:
        """Restore the newest checkpoint, open a session with it, and settle steps that the broker lacks."""
        for attempt in range(PATIENCE):
            try:
                state = disk.restore(self.others)
                answer = await self.say(
                    "OpenSession",
                    holder=self.member.me.instance_id,
                    checkpoint_step=state.step,
                    settles_ledger=True,
                    first_remembered_pass=state.first_remembered_pass,
                )
                await self.settle(disk, state, answer)
            except (OSError, LedgerError) as error:
                emit("restore-again", reason=str(error))
            except Fenced as refusal:
                # Another trainer has committed a newer checkpoint, or this one lost a committed step.
                emit("refused", reason=str(refusal))
                if self.control == "commit-without-checkpoint":
                    # The control continues with a step that its weights have not reached.
                    state.step = (await self.broker.call("GetRun")).run.committed_step
                    answer = await self.say(
                        "OpenSession", holder=self.member.me.instance_id, checkpoint_step=state.step
                    )
                    return self.opened(answer, state)
            else:
                return self.opened(answer, state)
            await asyncio.sleep(0.1 * (attempt + 1))
        raise SystemExit("the broker accepts no checkpoint for a session")

    async def settle(self, disk: CheckpointFolder, state: State, answer: broker_pb2.OpenSessionResponse) -> None:
        """Settle the steps that the broker lacks, one ledger line per call, so that a trap can be between any two."""
        honest = self.control != "settle-without-instances"
        digest = answer.ledger_digest if honest else ""
        path = disk.folder / LEDGER_FILE
        for lines in settlement(path, state.mark, answer.settle_from_step, state.step, digest):
            for step, instance_ids in lines:
                line = broker_pb2.TrainedStep(step=step, instance_ids=instance_ids if honest else [])
                await self.say("SettleTrained", session_epoch=answer.session_epoch, steps=[line])
                emit("settled", step=step)
                self.at("settling")

    def opened(self, answer: broker_pb2.OpenSessionResponse, state: State) -> State:
        """Record the session."""
        self.session = answer.session_epoch
        emit("leading", step=state.step, replayable=answer.replayable_steps, session=self.session)
        return state

    async def take(self, step: int) -> broker_pb2.BatchManifest:
        """Lease a step's batch and check the content of every group."""
        wait = to_duration(LEASE_WAIT_SECONDS)
        request = self.broker.request("LeaseExperience", session_epoch=self.session, step=step, wait=wait)

        async def read(stub) -> list[broker_pb2.LeaseExperienceResponse]:
            return [part async for part in stub.LeaseExperience(request, timeout=LEASE_WAIT_SECONDS + 2.0)]

        first, *parts = await self.refusable(self.broker.call_with_retry(read))
        groups = [part.group for part in parts]
        if len(groups) != len(first.manifest.instance_ids):
            raise SystemExit(f"step {step}: {len(groups)} groups for {len(first.manifest.instance_ids)} ids")
        for instance_id, group in zip(first.manifest.instance_ids, groups, strict=True):
            fault = content.fault_of(instance_id, group)
            if fault:
                raise SystemExit(f"step {step}: {fault}")
        return first.manifest

    async def save(self, disk: CheckpointFolder, state: State) -> None:
        """Make a checkpoint durable, then commit it."""
        disk.save(state, self.at)
        await self.commit(state)

    async def commit(self, state: State, point: str = "committed") -> None:
        answer = await self.say("Commit", session_epoch=self.session, step=state.step)
        state.first_remembered_pass = max(state.first_remembered_pass, answer.first_remembered_pass)
        emit("committed", step=state.step)
        self.at(point)

    async def say(self, method: str, **fields: object):
        """Make a call of the session, with retries. Raises Fenced."""
        return await self.refusable(self.broker.call(method, timeout=3.0, **fields))

    async def refusable(self, call: Awaitable):
        """Wait for a call. Raises Fenced if it fails with FAILED_PRECONDITION."""
        try:
            return await call
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                raise
            raise Fenced(describe(error)) from error

    def at(self, point: str) -> None:
        """Kill this process by SIGKILL if the trap file names this point."""
        try:
            if self.trap.read_text() != point:
                return
            self.trap.rename(self.trap.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return  # no trap, or another trainer took it
        emit("trapped", point=point)
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    await Trainer(**json.loads(sys.argv[1])).live()  # created on the event loop, which its channels need


if __name__ == "__main__":
    asyncio.run(main())
