"""The commands that control a trainer and a rollout: what they call, what they print, what they refuse."""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from real_broker import Life

from quartet_client import launcher
from quartet_client.cli.main import main
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.errors import aborted, failed_precondition, permission_denied
from quartet_contract.world import rollout
from quartet_server.host import ServiceHost

pytestmark = pytest.mark.timeout(60)


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Trains the fourth step of run "demo" until `trained` is set, and the run until `ended` is."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.trained, self.ended = asyncio.Event(), asyncio.Event()
        self.refusal: Exception | None = None

    def _note(self, request) -> None:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal

    async def GetStatus(self, request, context):  # noqa: N802
        return trainer_pb2.TrainerServiceGetStatusResponse(run_id="demo", step=4 if self.trained.is_set() else 3)

    async def WatchMetrics(self, request, context):  # noqa: N802
        ending, training = (asyncio.ensure_future(event.wait()) for event in (self.ended, self.trained))
        await asyncio.wait([ending, training], return_when=asyncio.FIRST_COMPLETED)
        if self.trained.is_set() and request.after_step < 3:
            yield trainer_pb2.WatchMetricsResponse(step=3)
        await ending

    async def Pause(self, request, context):  # noqa: N802
        self._note(request)
        return trainer_pb2.PauseResponse(step=4)

    async def Resume(self, request, context):  # noqa: N802
        self._note(request)
        return trainer_pb2.ResumeResponse(step=4)

    async def SaveCheckpoint(self, request, context):  # noqa: N802
        self._note(request)
        await self.trained.wait()
        return trainer_pb2.SaveCheckpointResponse(checkpoint=checkpoint(4))

    async def Stop(self, request, context):  # noqa: N802
        self._note(request)
        return trainer_pb2.StopResponse(step=4)


def checkpoint(step: int) -> trainer_pb2.Checkpoint:
    return trainer_pb2.Checkpoint(step=step, path=f"/runs/step-{step}", saved_at=Timestamp(seconds=1))


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """A rollout that has three groups to finish and gives two back."""

    def __init__(self) -> None:
        self.asked: list[rollout_pb2.SetDrainRequest] = []

    async def SetDrain(self, request, context):  # noqa: N802
        self.asked.append(request)
        if request.grace.seconds == 13:
            raise aborted("drain", "it was ended by another call; call again if the rollout is to leave")
        drained = {"finished": 3, "given_back": 2} if request.draining else {}
        return rollout_pb2.SetDrainResponse(run_id="demo", **drained)


@pytest.fixture
async def serve():
    """Serve a double at a free address; return the address."""
    hosts: list[ServiceHost] = []

    async def start(kind: str, add, servicer) -> str:
        host = ServiceHost(kind, "127.0.0.1:0", SecuritySection(), ServerSection(metrics=False, drain_seconds=0.1))
        add(servicer, host.server)
        await host.start()
        hosts.append(host)
        return host.address

    yield start
    for host in hosts:
        await host.drain()


@pytest.fixture
async def trainer(serve) -> tuple[Trainer, str]:
    double = Trainer()
    return double, await serve("trainer", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, double)


@pytest.fixture
def quartet(trainer, address, capsys) -> Callable[..., Coroutine[None, None, tuple[int, str]]]:
    """Run a `quartet` command against the double; return the exit status and what was printed."""

    async def run(*words: str, at: str = "") -> tuple[int, str]:
        own = ["--broker", address, "--set", f"addresses.trainer={at or trainer[1]}"]
        status = await asyncio.to_thread(main, [*words, *own])
        printed = capsys.readouterr()
        return status, (printed.out + printed.err).strip()

    return run


async def test_pause_returns_when_the_step_in_progress_is_done_and_resume_ends_it(trainer, quartet):
    pausing = asyncio.create_task(quartet("pause", "demo", "--limit", "90"))
    while not trainer[0].asked:
        await asyncio.sleep(0.01)
    (asked,) = trainer[0].asked
    assert (asked.reason, asked.limit.seconds) == ("quartet pause", 90)
    await asyncio.sleep(0.3)
    assert not pausing.done()
    trainer[0].trained.set()
    said = "run demo is paused after 4 steps; it goes on with: quartet resume demo, or by itself after 90 s"
    assert await pausing == (0, said)
    assert await quartet("pause") == (0, "run demo is paused after 4 steps; it goes on with: quartet resume demo")
    assert await quartet("resume", "demo") == (0, "run demo goes on after 4 steps")


async def test_checkpoint_and_stop_wait_and_say_what_is_kept(trainer, quartet, address):
    life = Life(address, "demo").submit("a", "b")
    life.answer()
    life.train()
    life.commit(1)
    trainer[0].trained.set()
    status, said = await quartet("checkpoint", "--json")
    assert (status, json.loads(said)) == (0, {"run_id": "demo", "step": 4, "path": "/runs/step-4"})
    assert (await quartet("checkpoint"))[1] == "run demo: the checkpoint of 4 steps is durable: /runs/step-4"
    stopping = asyncio.create_task(quartet("stop", "demo"))
    while not isinstance(trainer[0].asked[-1], trainer_pb2.StopRequest):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert not stopping.done()
    trainer[0].ended.set()
    status, said = await stopping
    assert status == 0 and said.startswith("the trainer of run demo has stopped; 1 steps are committed")


@pytest.mark.parametrize("command", ["pause", "resume", "checkpoint", "stop"])
async def test_another_run_a_trainer_that_is_away_and_a_refusal_are_one_sentence_each(
    trainer, quartet, nowhere, command
):
    status, said = await quartet(command, "other")
    assert status == 2 and "trains run 'demo', not 'other'; set addresses.trainer to" in said
    status, said = await quartet(command, "--set", "run.id=other")
    assert status == 2 and "trains run 'demo', not 'other'" in said
    status, said = await quartet(command, at=nowhere)
    assert status == 2 and said.startswith(f"quartet: trainer at {nowhere}: nothing listens there")
    assert trainer[0].asked == []
    denied = "caller 'bob' has the role rollout; allowed: client, operator"
    trainer[0].refusal = permission_denied("/quartet.v1.TrainerService/Stop", denied)
    status, said = await quartet(command)
    assert status == 2 and denied in said
    trainer[0].refusal = failed_precondition("checkpoint", "no batch has been trained yet")
    assert (await quartet(command))[0] == 2


@pytest.mark.parametrize("command", ["pause", "checkpoint", "stop"])
async def test_each_wait_ends_by_its_timeout(quartet, command):
    status, said = await quartet(command, "--timeout", "0.3")
    assert status == 1 and ("within 0.3 s, but was asked for" in said or "did not answer in time" in said), said


@pytest.mark.parametrize("words", [("pause",), ("checkpoint",), ("stop",), ("drain", "HUNG", "--grace", "0")])
async def test_a_service_that_hangs_is_waited_for_no_longer_than_the_timeout(quartet, words):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # and nobody accepts
        hung = f"127.0.0.1:{listening.getsockname()[1]}"
        began = asyncio.get_running_loop().time()
        status, said = await quartet(*(hung if word == "HUNG" else word for word in words), "--timeout", "1", at=hung)
        assert asyncio.get_running_loop().time() - began < 10
    assert status in (1, 2) and hung in said, said


async def test_drain_takes_an_address_or_the_name_of_a_member(serve, quartet, address):
    double = Rollout()
    at = await serve("rollout", rollout_pb2_grpc.add_RolloutServiceServicer_to_server, double)
    life = Life(address, "demo")
    life.call("RegisterMember", pb.RegisterMemberRequest(run_id="demo", member=rollout("r2", address=at)))
    said = (
        f"the rollout at {at} has left run demo: 3 groups finished, 2 prompts given back; it works again with: "
        f"quartet drain {at} --undo"
    )
    assert await quartet("drain", "r2", "--grace", "7") == (0, said)
    assert [(asked.draining, asked.grace.seconds) for asked in double.asked] == [(True, 7)]
    assert await quartet("drain", at, "--undo") == (0, f"the rollout at {at} works again for run demo")
    assert not double.asked[-1].draining
    status, said = await quartet("drain", "r3")
    assert status == 2 and "'r3' is no rollout of an active run; allowed: an address, or one of r1 at" in said
    status, said = await quartet("drain", at, "--grace", "13")
    assert status == 1 and "call again if the rollout is to leave" in said
    status, said = await quartet("drain", "host:port")
    assert status == 2 and "an address is host:port with a port from 0 to 65535" in said


async def test_rollback_calls_the_trainers_part_with_the_run_files_checkpoints(monkeypatch, capsys, tmp_path):
    given: list[str] = []

    def part(words: list[str], **_):
        given.extend(words)
        made = {"step": 9, "path": "/runs/step-9"}
        return launcher.subprocess.CompletedProcess(words, 0, json.dumps(made), "")

    command = ["rollback", "demo", "--to", "3", "--checkpoints", str(tmp_path)]
    assert main(command) == 2
    assert f"the newest checkpoint in '{tmp_path}' is not of run 'demo'" in capsys.readouterr().err
    monkeypatch.setattr(launcher.subprocess, "run", part)
    assert main([*command[:4], "--set", f"trainer.checkpoint.folder={tmp_path}/own"]) == 0
    assert given[1:] == ["-m", "quartet_trainer.rollback", f"{tmp_path}/own", "demo", "3"]
    assert capsys.readouterr().out == "run demo goes on at step 9 with the weights of step 3: /runs/step-9; start it\n"
