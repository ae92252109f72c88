"""A mixture with a curriculum, fed to a real broker: feeder and broker are killed, and nothing else comes of it."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from quartet.v1 import broker_pb2 as pb
from real_broker import ENVIRONMENT, REDIS_ANSWERS, Life, Started, life_of, redis_command

from quartet_common.durations import to_duration
from quartet_common.ports import free_ports
from quartet_contract.world import put_group

FEEDER = """
import asyncio, sys
from pathlib import Path
from quartet_client import AsyncClient
from quartet_client.data import DataSection
from quartet_client.feed import feed
from quartet_common.config import load_config

async def main():
    async with AsyncClient(sys.argv[2]) as client:
        print(await feed(load_config("data", DataSection, Path(sys.argv[1])), client, asyncio.Event()))

asyncio.run(main())
"""
ACCURACIES = {"easy": 1.0, "fair": 0.5, "hopeless": 0.0}


class Services:
    """Redis, a broker and a feeder; the latter two may be killed and started again."""

    def __init__(self, folder: Path, run_file: Path):
        redis_port, port = free_ports(2)
        self.folder, self.run_file, self.address = folder, run_file, f"127.0.0.1:{port}"
        self.redis = Started(redis_command(redis_port, folder), folder / "redis.log")
        self.redis.wait_until(lambda: REDIS_ANSWERS in self.redis.said(), "answers")
        settings = (f"addresses.broker={self.address}", f"broker.redis_url=redis://127.0.0.1:{redis_port}/0")
        words = [word for each in (*settings, "server.metrics=false") for word in ("--set", each)]
        self._command = [ENVIRONMENT / "bin" / "python", "-m", "quartet_broker", *words]
        self.start()

    def start(self) -> None:
        self.broker = Started(self._command, self.folder / "broker.log")
        self.broker.wait_until(lambda: "serving at" in self.broker.said(), "serves")
        self.feeder = feeder(self.run_file, self.address, self.folder)

    def kill(self) -> None:
        self.feeder.close()
        self.broker.close()

    def close(self) -> None:
        self.kill()
        self.redis.close()


@pytest.fixture
def run_file(tmp_path, write) -> Path:
    for name, prompts in (("easy", 4), ("fair", 8), ("hopeless", 4)):
        write(f"{name}.jsonl", "".join(f'{{"prompt": "{name} {n}", "gt_answer": "1"}}\n' for n in range(prompts)))
    sources = ", ".join(f"'{tmp_path / name}.jsonl'" for name in ACCURACIES)
    return write(
        "run.toml",
        "[run]\nid = 'mixed'\ngroups_per_step = 1000\nmax_queued_prompts = 24\nmember_ttl = 600\n"
        "curriculum = {window = 1, floor = 0.2}\n"
        f"[data]\ntrain = [{sources}]\npasses = 4\n",
    )


def feeder(run_file: Path, address: str, folder: Path) -> Started:
    return Started([sys.executable, "-c", FEEDER, run_file, address], folder / "feeder.log")


@pytest.fixture
def services(tmp_path, run_file) -> Iterator[Services]:
    (tmp_path / "killed").mkdir()
    with closing(Services(tmp_path / "killed", run_file)) as begun:
        yield begun


def use(life: Life, most: int) -> list[str]:
    """Lease and answer prompts, one after the other, until `most` were used or the data end; return their ids."""
    used: list[str] = []
    deadline = time.monotonic() + 60
    while len(used) < most:
        assert time.monotonic() < deadline, f"{len(used)} of {most} prompts came"
        request = pb.LeasePromptsRequest(run_id=life.id, holder="r1", max_prompts=1, wait=to_duration(0.1))
        for lease in life.call("LeasePrompts", request).leases:
            done = put_group(lease)
            done.group.header.ans_acc = ACCURACIES[lease.instance.source]
            life.call("PutExperience", pb.PutExperienceRequest(run_id=life.id, groups=[done]))
            used.append(lease.instance.instance_id)
            break
        else:
            run = life.call("GetRun", pb.GetRunRequest(run_id=life.id)).run
            if run.prompts_ended and not run.stats.queued:
                break
    return used


def test_feeder_and_broker_killed_in_the_middle_use_and_skip_the_same_prompts(address, services, run_file, tmp_path):
    with closing(feeder(run_file, address, tmp_path)):
        whole = life_of(address, run_file)
        expected = use(whole, 1000)
    killed = life_of(services.address, run_file)
    found: list[str] = []
    for most in (7, 9):
        found += use(killed, most)
        services.kill()
        services.start()
        killed = life_of(services.address, run_file)
    found += use(killed, 1000)
    assert found == expected
    runs = [each.call("GetRun", pb.GetRunRequest(run_id="mixed")).run for each in (whole, killed)]
    assert runs[0].stats == runs[1].stats and list(runs[0].sources) == list(runs[1].sources)
    easy, fair, hopeless = runs[0].sources
    assert easy.solved > 5 and hopeless.hopeless > 5 and fair.solved == fair.hopeless == 0
    assert runs[0].stats.submitted == len(expected) + runs[0].stats.skipped
    audit = list(killed.call("AuditRun", pb.AuditRunRequest(run_id="mixed")))
    assert not audit[-1].summary.faults
