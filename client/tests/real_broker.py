"""The real broker over a real Redis, each a process, from the broker's environment; and a run's life there."""

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, experience_pb2
from small_services import transcript

from quartet_common.channel import connect_sync
from quartet_common.durations import to_duration
from quartet_common.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".quartet" / "envs" / "broker"
sys.path.append(str(ROOT / "tests" / "preloaded"))

from started import REDIS_ANSWERS, Started, redis_command  # noqa: E402


@contextmanager
def real_broker(folder: Path):
    """Yield the address of a fresh broker; both processes are gone afterwards."""
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
        yield f"127.0.0.1:{port}"


class Life:
    """A run at a real broker, with the calls of a rollout and a trainer that lead its groups through their lives."""

    def __init__(self, address: str, run_id: str, spec: broker_pb2.RunSpec | None = None, **fields: int):
        self.run_id = run_id
        self._channel = connect_sync(address)
        self._stub = broker_pb2_grpc.BrokerServiceStub(self._channel)
        create = broker_pb2.CreateRunRequest(spec=spec or broker_pb2.RunSpec(run_id=run_id, **fields))
        self.run = self._stub.CreateRun(create, timeout=30).run
        self._session = None
        for name, kind in (("rollout-1", common_pb2.SERVICE_KIND_ROLLOUT), ("trainer-1", 4)):
            member = broker_pb2.Member(instance_id=name, kind=kind, address="127.0.0.1:1", state=2)
            self("RegisterMember", member=member)

    def __call__(self, method: str, **fields):
        request = getattr(broker_pb2, f"{method}Request")(**{"run_id": self.run_id, **fields})
        return getattr(self._stub, method)(request, timeout=30)

    def close(self) -> None:
        self._channel.close()

    def submit(self, *names: str, **fields) -> None:
        prompt = experience_pb2.Prompt(prompt_id="sum", text="1+1=?")
        fields |= {"prompt": prompt, "purpose": experience_pb2.PURPOSE_TRAIN}
        instances = [experience_pb2.PromptInstance(instance_id=name, **fields) for name in names]
        self("SubmitPrompts", instances=instances)

    def lease(self, count: int = 1) -> list[broker_pb2.PromptLease]:
        return list(self("LeasePrompts", holder="rollout-1", max_prompts=count, wait=to_duration(1)).leases)

    def put(self, count: int = 1) -> None:
        """Answer prompts that are there with the echo policy."""
        groups = [broker_pb2.PutGroup(lease_id=each.lease_id, group=echoed_group(each)) for each in self.lease(count)]
        if groups:
            self("PutExperience", groups=groups)

    def train(self, step: int = 0) -> list[str]:
        """Train a step; return whose groups were in it."""
        self._session = self._session or self("OpenSession", holder="trainer-1").session_epoch
        about = {"session_epoch": self._session, "step": step}
        first, *_ = self("LeaseExperience", **about, wait=to_duration(10))
        self("MarkTrained", **about)
        return list(first.manifest.instance_ids)

    def commit(self, step: int) -> None:
        self("Commit", session_epoch=self._session, step=step)


def echoed_group(lease: broker_pb2.PromptLease) -> experience_pb2.ExperienceGroup:
    """Return the echo policy's group of a leased prompt."""
    done = transcript(lease.instance)
    done.completions[0].generated_after.CopyFrom(to_duration(0.25))
    done.completions[0].scored_after.CopyFrom(to_duration(0.5))
    reward = done.completions[0].score.reward
    header = experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        completions=1,
        completion_tokens=done.completions[0].tokens,
        reward_mean=reward,
        ans_acc=reward,
        attempt=lease.attempt,
    )
    return experience_pb2.ExperienceGroup(header=header, tensors=b"opaque", transcript=done.SerializeToString())
