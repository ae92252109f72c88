"""What the service's tests share: receivers in processes of their own, a broker over a real socket, a small learner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2, common_pb2


class ReceiverProcess:
    """A receiver.py that runs, as a member of a run."""

    def __init__(self, name: str, folder: Path, *options: str):
        command = [sys.executable, str(Path(__file__).with_name("receiver.py")), name, str(folder), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, self.folder = name, folder
        port = self.process.stdout.readline().strip()
        assert port, f"receiver {name} did not start"
        self.member = broker_pb2.Member(
            instance_id=name,
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address=f"127.0.0.1:{port}",
            capabilities=["weights.gloo"],
            state=broker_pb2.MEMBER_STATE_JOINING,
            policy_version=-1,
        )

    def installed(self, version: int) -> bytes | None:
        """The buckets it installed as `version`."""
        path = self.folder / f"{self.name}-v{version}.bin"
        return path.read_bytes() if path.exists() else None

    def wait_until_stopped(self, seconds: float = 60) -> None:
        """Return when it stands still by a SIGSTOP; a SIGCONT that came before that would be in vain."""
        deadline = time.monotonic() + seconds
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline, f"receiver {self.name} did not stop"
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Callable[..., ReceiverProcess]]:
    """Start receivers; they are ended after the test."""
    started: list[ReceiverProcess] = []

    def start(name: str, *options: str) -> ReceiverProcess:
        started.append(ReceiverProcess(name, tmp_path, *options))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker with the run 'test' and endless batches."""
    broker = FakeBroker()
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 128 tokens that any CPU trains in a moment."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    return folder
