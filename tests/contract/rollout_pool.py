"""A broker, rollouts that come, and the trainer's real publisher; all of them processes."""

import json
from pathlib import Path

from quartet.v1 import broker_pb2 as pb
from servers_under_test import Server, Servers, copy_models, free_addresses, python_of
from started import Answering

from quartet_common.durations import to_duration

RUN = "pool"
ROLLOUTS = 3
MEMBER_TTL_SECONDS = 6.0
DEADLINE_SECONDS = 45.0
PATIENCE_SECONDS = 240.0
SCRIPT = Path(__file__).with_name("pool_trainer.py")


class Trainer(Answering):
    """The process of pool_trainer.py. `weights`: keys of [trainer.weights]."""

    def __init__(self, folder: Path, model: Path, broker: str, **weights: object):
        settings = {"timeout_seconds": DEADLINE_SECONDS, **weights}
        arguments = [str(model), broker, RUN, str(folder / "weights"), json.dumps(settings)]
        super().__init__([python_of("trainer"), SCRIPT, *arguments], folder / "pool_trainer.log")

    def publish(self, version: int) -> dict:
        """Have it publish a version; return what came of it."""
        return self.order(do="publish", version=version)

    def members(self) -> list[str]:
        """Return the rollouts that it knows to live."""
        return self.order(do="members")["members"]


class Pool(Servers):
    """Broker, rollouts that come and go, and the trainer's publisher. `folder` is empty.

    `environment`: of the services that are started from now on.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.rollouts: dict[str, Server] = {}
        self._count = 0

    def start(self) -> None:
        """Start all, with a run without prompts, and wait until the first rollouts are members."""
        copy_models(self.folder / "model")
        _, url = self.start_redis()
        broker = self._serve("broker", "broker", redis_url=url)
        for _ in range(ROLLOUTS):
            self.add()
        spec = pb.RunSpec(run_id=RUN, group_size=2, groups_per_step=2, member_ttl=to_duration(MEMBER_TTL_SECONDS))
        broker.caller().call("BrokerService.CreateRun", pb.CreateRunRequest(spec=spec))
        self.start_trainer()
        self.wait_for_members(ROLLOUTS)

    def start_trainer(self, **weights: object) -> None:
        """Start a trainer that knows of no other, with keys of [trainer.weights]."""
        self.trainer = Trainer(self.folder, self.folder / "model", self.addresses["broker"], **weights)
        self.processes.append(self.trainer)
        assert self.trainer.hear() == {"ready": True}

    def add(self) -> str:
        """Start a rollout, which is not waited for; return its name."""
        self._count += 1
        name = f"rollout-{self._count}"
        self.addresses["rollout"] = free_addresses()["rollout"]
        self.rollouts[name] = self._serve("rollout", name, engine="transformers")
        return name

    def wait_for_members(self, count: int) -> None:
        """Wait until the trainer knows so many rollouts."""
        some = next(iter(self.rollouts.values()))
        some.wait_until(lambda: len(self.trainer.members()) >= count, f"{count} are members", PATIENCE_SECONDS)

    def _serve(self, kind: str, name: str, **section: object) -> Server:
        run = {"id": RUN, "folder": str(self.folder / f"run-{name}")}
        return self.serve(kind, name, sections={"run": run, "model": {"path": str(self.folder / "model")}}, **section)
