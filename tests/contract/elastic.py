"""Rollouts come, die in mid-broadcast and hang while a run goes on. Real services, the trainer's real publisher.

    .quartet/envs/dev/bin/python tests/contract/elastic.py [--updates 30 --kills 5 --stops 3 --adds 5 --transport gloo]

Every step leases a batch, marks it as trained and publishes the next version. The run must never stand longer than the
deadline of an update, every prompt must be trained exactly once, and every rollout must end on the last version.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2, reward_pb2
from quartet.v1 import rollout_pb2 as rollout
from servers_under_test import KINDS, Process, Redis, Server, free_ports, make_models, python_of

from quartet_client.contract.calls import Caller
from quartet_common.durations import to_duration

RUN = "elastic"
GROUPS_PER_STEP = 2
ROLLOUTS = 3
MEMBER_TTL_SECONDS = 3.0
LEASE_TTL_SECONDS = 6.0
DEADLINE_SECONDS = 45.0
PATIENCE_SECONDS = 240.0
STOP_AT = 9  # tensors into an update, of some thirty: several buckets are on their way
SCRIPT = Path(__file__).with_name("elastic_trainer.py")


@dataclass(frozen=True)
class Schedule:
    """What happens in which update, from 1."""

    updates: int
    kills: int
    stops: int
    adds: int

    def events(self) -> dict[int, list[str]]:
        """Events by update, spread evenly; what is stopped goes on in the update after the next."""
        events: dict[int, list[str]] = {}
        for kind, count, shift in (("kill", self.kills, 0.0), ("add", self.adds, 0.3), ("stop", self.stops, 0.6)):
            for index in range(count):
                at = 2 + int((index + shift) * (self.updates - 1) / max(count, 1))
                events.setdefault(min(at, self.updates), []).append(kind)
        return events


@dataclass
class Outcome:
    """What came of a run."""

    trained: list[str] = field(default_factory=list)
    """Prompts, as often as they were trained."""
    publish_seconds: list[float] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    """Rollouts killed, stopped and added ("kill", "stop", "add")."""
    failures: list[str] = field(default_factory=list)
    """What the publisher said of updates that needed a second attempt."""
    versions: dict[str, int] = field(default_factory=dict)
    """Policy version of each rollout at the end."""


class Trainer:
    """The process of elastic_trainer.py."""

    def __init__(self, folder: Path, model: Path, broker: str, **weights: object):
        """`weights`: keys of [trainer.weights]."""
        self._log = folder / "elastic_trainer.log"
        settings = {"timeout_seconds": DEADLINE_SECONDS, **weights}
        arguments = [str(model), broker, RUN, str(folder / "weights"), json.dumps(settings)]
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python_of("trainer")), str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def tell(self, **order) -> None:
        """Give an order."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict:
        """Return its next answer."""
        line = self._process.stdout.readline()
        assert line, f"the trainer ended: {self._log.read_text(errors='replace')[-3000:]}"
        return json.loads(line)

    def publish(self, version: int) -> dict:
        """Have it publish a version; return what came of it."""
        self.tell(do="publish", version=version)
        return self.hear()

    def members(self) -> list[str]:
        """Return the rollouts that it knows to live."""
        self.tell(do="members")
        return self.hear()["members"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(10)


class Pool:
    """Broker, reward, rollouts that come and go, and the trainer."""

    def __init__(self, folder: Path, transport: str):
        self.folder = folder
        self.rollouts: dict[str, Server] = {}
        self._processes: list[Process | Trainer] = []
        self._addresses = {kind: f"127.0.0.1:{port}" for kind, port in zip(KINDS, free_ports(4), strict=True)}
        self._transport = transport
        self._count = 0
        self.environment: dict[str, str] = {}
        """Variables of the services that are started from now on."""

    def start(self, prompts: int) -> None:
        """Start all, with a run of so many prompts, and wait until the first rollouts are members."""
        make_models(self.folder / "model")
        redis = Redis(self.folder)
        self._processes.append(redis)
        self._server("broker", redis_url=redis.url)
        self._server("reward")
        for _ in range(ROLLOUTS):
            self.add()
        self.broker: Caller = self._processes[1].caller()
        self._make_run(prompts)
        self.start_trainer()
        self.wait_for_members(ROLLOUTS)

    def start_trainer(self, **weights: object) -> None:
        """Start a trainer that knows of no other, with keys of [trainer.weights]."""
        settings = {"transport": self._transport, **weights}
        self.trainer = Trainer(self.folder, self.folder / "model", self._addresses["broker"], **settings)
        self._processes.append(self.trainer)
        assert self.trainer.hear() == {"ready": True}

    def add(self) -> str:
        """Start a rollout, which is not waited for; return its name."""
        self._count += 1
        name = f"rollout-{self._count}"
        (port,) = free_ports(1)
        self.rollouts[name] = self._server("rollout", name, f"127.0.0.1:{port}", engine="transformers")
        return name

    def wait_for_members(self, count: int) -> None:
        """Wait until the trainer knows so many rollouts."""
        some = next(iter(self.rollouts.values()))
        some.wait_until(lambda: len(self.trainer.members()) >= count, f"{count} are members", PATIENCE_SECONDS)

    def _server(self, kind: str, name: str = "", address: str = "", **section: object) -> Server:
        sections: dict[str, dict[str, object]] = {
            "run": {"id": RUN, "folder": str(self.folder / f"run-{name or kind}")},
            "model": {"path": str(self.folder / "model")},
            "addresses": self._addresses | ({kind: address} if address else {}),
            "server": {"metrics": False},
            kind: section,
        }
        server = Server(kind, self.folder, sections, name, environment=self.environment)
        self._processes.append(server)
        return server

    def _make_run(self, prompts: int) -> None:
        sampling = experience_pb2.SamplingParams(n=2, temperature=1.0, max_new_tokens=24)
        spec = pb.RunSpec(
            run_id=RUN,
            group_size=2,
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=1,
            max_deliveries=50,
            sampling=sampling,
            verifiers=[reward_pb2.VerifierSpec(name="length", weight=1.0)],
            member_ttl=to_duration(MEMBER_TTL_SECONDS),
            prompt_lease_ttl=to_duration(LEASE_TTL_SECONDS),
        )
        self.broker.call("BrokerService.CreateRun", pb.CreateRunRequest(spec=spec))
        instances = [
            experience_pb2.PromptInstance(
                instance_id=f"p{index}",
                prompt=experience_pb2.Prompt(prompt_id=f"p{index}", text=f"{index}+1=?"),
                purpose=experience_pb2.PURPOSE_TRAIN,
            )
            for index in range(prompts)
        ]
        self.broker.call("BrokerService.SubmitPrompts", pb.SubmitPromptsRequest(run_id=RUN, instances=instances))
        self.broker.call("BrokerService.EndPrompts", pb.EndPromptsRequest(run_id=RUN))

    def close(self) -> None:
        """Kill everything."""
        for process in reversed(self._processes):
            process.close()


@contextmanager
def started_pool(folder: Path, prompts: int, transport: str = "gloo") -> Iterator[Pool]:
    """A pool with a run of so many prompts; `folder` is empty."""
    pool = Pool(folder, transport)
    try:
        pool.start(prompts)
        yield pool
    finally:
        pool.close()


class ScheduledRun:
    """A run in which a schedule is carried out."""

    def __init__(self, pool: Pool, schedule: Schedule):
        self.pool, self.schedule, self.outcome = pool, schedule, Outcome()
        self.stopped: dict[str, int] = {}  # name: the update in which it goes on

    def go(self) -> Outcome:
        """Carry it out."""
        session = self._call("OpenSession", pb.OpenSessionRequest(run_id=RUN, holder="elastic")).session_epoch
        events = self.schedule.events()
        self._publish(0, [])
        for step in range(self.schedule.updates):
            version = step + 1
            self._train(session, step)
            self._go_on(version)
            self._publish(version, events.get(version, []))
        self._go_on(sys.maxsize)
        self._settle(self.schedule.updates)
        return self.outcome

    def _call(self, rpc: str, request):
        return self.pool.broker.call(f"BrokerService.{rpc}", request)

    def _train(self, session: int, step: int) -> None:
        """Lease the step's batch and have it trained and durable."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        request = pb.LeaseExperienceRequest(run_id=RUN, session_epoch=session, step=step, wait=to_duration(2))
        while not (answers := self._call("LeaseExperience", request))[0].manifest.granted:
            assert time.monotonic() < deadline, f"no batch for step {step}: {self.outcome}"
            self._publish(step, [])  # as the training loop does while it waits: who came or rested gets the weights
        self.outcome.trained += answers[0].manifest.instance_ids
        self._call("MarkTrained", pb.MarkTrainedRequest(run_id=RUN, session_epoch=session, step=step))
        self._call("Commit", pb.CommitRequest(run_id=RUN, session_epoch=session, step=step + 1))

    def _publish(self, version: int, events: list[str]) -> None:
        """Publish a version; who is to die or to hang does so while its tensors are on their way."""
        trainer = self.pool.trainer
        self.outcome.happened.update(events)
        for _ in range(events.count("add")):
            self.pool.add()
        harm = [event for event in events if event != "add"]
        trainer.tell(do="publish", version=version, stop_at=STOP_AT if harm else -1)
        answer = trainer.hear()
        if harm:
            assert answer == {"sending": True}, answer
            for event in harm:
                self._harm(event, version)
            trainer.tell(go=True)
            answer = trainer.hear()
        self.outcome.publish_seconds.append(answer["seconds"])
        self.outcome.failures += answer["failures"]

    def _harm(self, event: str, version: int) -> None:
        """Kill or stop the oldest rollout that has weights."""
        name = next(name for name in self.pool.rollouts if name not in self.stopped and self._version(name) >= 0)
        process = self.pool.rollouts[name].popen
        if event == "kill":
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            del self.pool.rollouts[name]
        else:
            os.killpg(process.pid, signal.SIGSTOP)
            self.stopped[name] = version + 2

    def _go_on(self, version: int) -> None:
        for name in [name for name, when in self.stopped.items() if when <= version]:
            os.killpg(self.pool.rollouts[name].popen.pid, signal.SIGCONT)
            del self.stopped[name]

    def _settle(self, version: int) -> None:
        """Publish the last version until every rollout has it: those that rest or load are given their time."""
        pool = self.pool

        def settled() -> bool:
            self._publish(version, [])
            self.outcome.versions = {name: self._version(name) for name in pool.rollouts}
            return set(self.outcome.versions.values()) == {version}

        pool.wait_for_members(len(pool.rollouts))
        some = next(iter(pool.rollouts.values()))
        some.wait_until(settled, f"all have version {version}: {self.outcome.versions}", PATIENCE_SECONDS)

    def _version(self, name: str) -> int:
        caller = self.pool.rollouts[name].caller()
        return caller.call("RolloutService.GetStatus", rollout.RolloutServiceGetStatusRequest()).policy_version


def main() -> int:
    parser = argparse.ArgumentParser(description="Rollouts come, die and hang while a run goes on.")
    for name, default in (("updates", 30), ("kills", 5), ("stops", 3), ("adds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--transport", choices=("gloo", "file"), default="gloo")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(options.updates, options.kills, options.stops, options.adds)
        prompts = schedule.updates * GROUPS_PER_STEP
        with started_pool(Path(folder), prompts, options.transport) as pool:
            outcome = ScheduledRun(pool, schedule).go()
    lost = prompts - len(set(outcome.trained))
    twice = len(outcome.trained) - len(set(outcome.trained))
    longest = max(outcome.publish_seconds)
    print(f"updates {options.updates}; {dict(outcome.happened)}")
    print(f"longest update {longest:.1f} s (deadline {DEADLINE_SECONDS:g} s); groups lost {lost}, twice {twice}")
    print(f"versions at the end: {outcome.versions}; second attempts: {len(outcome.failures)}")
    return int(bool(lost or twice or longest > DEADLINE_SECONDS))


if __name__ == "__main__":
    sys.exit(main())
