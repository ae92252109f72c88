"""The trainer's command as a process, on a tiny model."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from fake_broker import FakeBroker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import Forked
from quartet.v1 import trainer_pb2, trainer_pb2_grpc

from quartet_common.ports import free_port
from quartet_trainer.__main__ import main


def start_command(options: list[str]) -> None:
    sys.argv = ["quartet-trainer", *options]
    sys.exit(main())


class TrainerProcess(Forked):
    """The command, as a person starts it; with `environment` as torchrun does."""

    def __init__(
        self, folder: Path, *overrides: str, environment: dict[str, str] | None = None, options: tuple[str, ...] = ()
    ):
        self.port = free_port()
        overrides = (f"addresses.trainer=127.0.0.1:{self.port}", *overrides)
        self.options = [*options, *(word for override in overrides for word in ("--set", override))]
        super().__init__(folder / f"trainer-{self.port}.stderr", start_command, self.options, environment=environment)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    def status(self) -> trainer_pb2.TrainerServiceGetStatusResponse:
        request = trainer_pb2.TrainerServiceGetStatusRequest()
        return self.stub.GetStatus(request, timeout=60, wait_for_ready=True)

    def health(self) -> Any:
        """A call whose answers have its states, as they change."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        return stub.Watch(health_pb2.HealthCheckRequest(), timeout=120, wait_for_ready=True)

    def own(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def wait_for(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Return when it is so; fail if it is not in time, or the process has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        """The ranks that it started."""
        return [child for child in self.own().children() if child.name() != "git"]  # which tells the build

    def outcome(self, seconds: float = 120.0) -> tuple[int, str]:
        """Wait for its end; returns its exit status and what it said."""
        return self.wait(seconds), self.said()


@pytest.fixture
def basics(broker: FakeBroker, model_path: Path, tmp_path: Path) -> tuple[str, ...]:
    folder = f"run.folder={tmp_path / 'run'}"
    return (
        "run.id=test",
        "server.metrics=false",
        f"addresses.broker={broker.address}",
        f"model.path={model_path}",
        folder,
    )


Start = Callable[..., TrainerProcess]


@pytest.fixture
def trainer(basics: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    """Start trainers of the run 'test'; they are ended after the test."""
    started: list[TrainerProcess] = []

    def start(*overrides: str, environment: dict[str, str] | None = None) -> TrainerProcess:
        started.append(TrainerProcess(tmp_path, *basics, *overrides, environment=environment))
        return started[-1]

    yield start
    for trainer in started:
        trainer.channel.close()
        trainer.end()
