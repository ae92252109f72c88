"""The real broker over a real Redis, each a process, from the broker's environment; and a run's life there."""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2, reward_pb2

from quartet_client.data import DataSection
from quartet_common.config import load_config, split_address
from quartet_common.durations import to_duration
from quartet_common.ports import free_ports
from quartet_common.run_spec import run_spec
from quartet_contract.calls import Caller
from quartet_contract.world import TRAIN, BrokerRun, World, put_group

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".quartet" / "envs" / "broker"
sys.path.append(str(ROOT / "tests" / "preloaded"))

from started import REDIS_ANSWERS, Started, redis_command  # noqa: E402

_COPY = "for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', ARGV[1]) end"


@dataclass(frozen=True)
class RealBroker:
    """A broker that runs, and its Redis."""

    address: str
    redis_port: int

    def forget_all_runs(self) -> None:
        """Have it be as it was at its start."""
        self._redis("FLUSHALL")

    def snapshot(self) -> None:
        """Keep what Redis holds now."""
        self._redis("SELECT 1", "FLUSHDB", "SELECT 0", f'EVAL "{_COPY}" 0 1')

    def restore(self) -> None:
        """Have Redis hold again what it held at the snapshot."""
        self._redis("FLUSHDB", "SELECT 1", f'EVAL "{_COPY}" 0 0')

    def set_maxmemory(self, size: str) -> None:
        """Limit Redis' memory; "0": no limit."""
        self._redis(f"CONFIG SET maxmemory {size}")

    def _redis(self, *commands: str) -> None:
        with socket.create_connection(("127.0.0.1", self.redis_port), timeout=20) as redis:
            for command in commands:
                redis.sendall(f"{command}\r\n".encode())
                answer = redis.recv(1000)
                assert not answer.startswith(b"-"), (command, answer)


@contextmanager
def real_broker(folder: Path) -> Iterator[RealBroker]:
    """Yield a fresh broker; both processes are gone afterwards."""
    redis_port, port = free_ports(2)
    settings = {
        "addresses.broker": f"127.0.0.1:{port}",
        "broker.redis_url": f"redis://127.0.0.1:{redis_port}/0",
        "server.metrics": "false",
    }
    command = [ENVIRONMENT / "bin" / "python", "-m", "quartet_broker"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with ExitStack() as started:
        redis = Started(redis_command(redis_port, folder), folder / "redis.log")
        started.callback(redis.close)
        redis.wait_until(lambda: REDIS_ANSWERS in redis.said(), "answers")
        broker = Started(command, folder / "broker.log")
        started.callback(broker.close)
        broker.wait_until(lambda: "serving at" in broker.said(), "serves")
        yield RealBroker(f"127.0.0.1:{port}", redis_port)


@contextmanager
def door(address: str, to: str) -> Iterator[None]:
    """Have an address lead to another one. Afterwards nothing listens there, and all that went through is cut off."""
    ends: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def let_through() -> None:
        with suppress(OSError):  # the door was shut
            while True:
                pair = listener.accept()[0], socket.create_connection(split_address(to))
                ends.extend(pair)
                for way in (pair, pair[::-1]):
                    threading.Thread(target=carry, args=way, daemon=True).start()

    with socket.create_server(split_address(address)) as listener:
        ends.append(listener)
        threading.Thread(target=let_through, daemon=True).start()
        yield
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Life(BrokerRun):
    """A run at a real broker; its one rollout has the echo policy."""

    def __init__(self, address: str, run_id: str, **spec):
        super().__init__(World({"BrokerService": Caller(address)}), run_id, **spec)

    def answer(self, count: int = 100, evil: str = "") -> None:
        """Answer prompts, waiting a moment for them; `evil` is what else a model or a service may write."""
        request = pb.LeasePromptsRequest(run_id=self.id, holder="r1", max_prompts=count, wait=to_duration(0.2))
        groups = []
        for lease in self.call("LeasePrompts", request).leases:
            answer, done = put_group(lease), echo(lease.instance, evil)
            answer.group.transcript = done.SerializeToString()
            answer.group.header.ans_acc = done.completions[0].score.ans_acc
            groups.append(answer)
        if groups:
            self.call("PutExperience", pb.PutExperienceRequest(run_id=self.id, groups=groups))

    def train(self, step: int = 0) -> list[str]:
        """Train a step; return whose groups were in it."""
        if not self.session:
            self.open()
        about = {"run_id": self.id, "session_epoch": self.session, "step": step}
        first, *_ = self.call("LeaseExperience", pb.LeaseExperienceRequest(**about))
        self.call("MarkTrained", pb.MarkTrainedRequest(**about))
        return list(first.manifest.instance_ids)

    def commit(self, steps: int) -> None:
        """Have a checkpoint of the first steps durable."""
        self.call("Commit", pb.CommitRequest(run_id=self.id, session_epoch=self.session, step=steps))

    def report(self, **event) -> None:
        """Report an event of the run."""
        self.call("ReportProgress", pb.ReportProgressRequest(run_id=self.id, event=pb.RunEvent(**event)))

    def attack(self, text: str, step: int = 0) -> None:
        """Have a step done, a group shown and a notice given, with a text wherever others write."""
        prompt = experience_pb2.Prompt(prompt_id="p", text=f"<think>{text}</think>{text}")
        attacking = experience_pb2.PromptInstance(instance_id="attack", prompt=prompt, purpose=TRAIN)
        self.call("SubmitPrompts", pb.SubmitPromptsRequest(run_id=self.id, instances=[attacking]))
        self.answer(evil=text)
        metrics = {
            "reward/mean": 0.25,
            "reward/ans_acc": 0.5,
            "time/step": 1.0,
            "time/training": 1.0,
            "staleness/mean": 0,
        }
        self.report(step=pb.StepFinished(step=step, policy_version=step + 1, metrics=metrics))
        self.report(notice=pb.Notice(level=text, text=text, source=text))


def life_of(address: str, run_file: Path) -> Life:
    """Return the run of a run file."""
    spec = run_spec(load_config("data", DataSection, run_file).run)
    return Life(address, **{field.name: value for field, value in spec.ListFields()})


def echo(instance: experience_pb2.PromptInstance, evil: str = "") -> experience_pb2.GroupTranscript:
    """Return the echo policy's group: one completion, the prompt's own text, right if it contains the answer."""
    text, answer = instance.prompt.text, instance.prompt.reference.answer
    right = bool(answer) and answer in text
    score = reward_pb2.Score(
        reward=float(right),
        ans_acc=float(right),
        format_acc=1.0,
        outcome=reward_pb2.OUTCOME_CORRECT if right else reward_pb2.OUTCOME_INCORRECT,
        parsed_answer=evil or text[-1:],
        reason=evil or ("the answer is in the text" if right else "the answer is not in the text"),
    )
    part = score.verifiers.add(name=evil or "echo", reward=score.reward, weight=1.0, outcome=score.outcome)
    part.reason, part.ans_acc = score.reason, score.ans_acc
    part.reads.append("solution" if instance.prompt.columns else "gt_answer")
    score.verifiers.add(name="length", reward=-0.5, weight=2.0, outcome=reward_pb2.OUTCOME_UNJUDGED, reason="9 tokens")
    spans = [
        experience_pb2.VersionSpan(policy_version=3, begin=0, end=2),
        experience_pb2.VersionSpan(policy_version=4, begin=2, end=len(text)),
    ]
    completion = experience_pb2.CompletionInfo(
        text=text,
        finish_reason=experience_pb2.FINISH_REASON_STOP,
        version_spans=spans,
        score=score,
        tokens=len(text),
        generated_after=to_duration(0.25),
        scored_after=to_duration(0.5),
    )
    return experience_pb2.GroupTranscript(
        instance=instance, prompt_text=text, completions=[completion], rollout_id=evil or "r1"
    )
