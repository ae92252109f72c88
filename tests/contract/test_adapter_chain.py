"""LoRA from end to end: a trainer that trains an adapter, rollouts that are sent it alone, and PEFT as the judge."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from quartet.v1 import broker_pb2
from quartet.v1 import rollout_pb2 as pb
from servers_under_test import KINDS, Process, Redis, Server, free_ports, make_models, python_of

from quartet_client.contract import cases_rollout as cases
from quartet_client.contract.broker_arrangements import BrokerRun
from quartet_client.contract.target import group_tensors
from quartet_client.contract.world import World
from quartet_common.tensors import decode

pytestmark = pytest.mark.timeout(400)

RUN = "adapters"
TARGETS = ["q_proj", "v_proj", "down_proj"]
STEPS = 2
PATIENCE_SECONDS = 200.0
SCRIPT = Path(__file__).with_name("adapter_scores.py")


class Chain:
    """Broker, reward, trainer, and rollouts that come; all of them real."""

    def __init__(self, folder: Path):
        self.folder, self.base = folder, folder / "model"
        self.versions = folder / "versions"
        self._addresses = {kind: f"127.0.0.1:{port}" for kind, port in zip(KINDS, free_ports(4), strict=True)}
        self._processes: list[Process] = []

    def start(self) -> None:
        """Start all but rollouts, with groups for all steps."""
        make_models(self.base)
        redis = Redis(self.folder)
        self._processes.append(redis)
        broker = self._server("broker", redis_url=redis.url)
        self._server("reward")
        run = BrokerRun(World({"BrokerService": broker.caller()}), RUN, groups_per_step=1, max_staleness=STEPS)
        for step in range(STEPS):
            run.put(run.submit(f"p{step}").lease(1), tensors=group_tensors().SerializeToString())
        run.call("LeaveMember", broker_pb2.LeaveMemberRequest(run_id=RUN, instance_id="r1"))
        lora = {"trainer.lora": {"r": 4, "alpha": 8.0, "target_modules": TARGETS}}
        weights = {"trainer.weights": {"transport": "file", "folder": str(self.versions)}}
        self._server("trainer", more=lora | weights, tensorboard=False, learning_rate=0.05)

    def rollout(self, name: str) -> Server:
        """Start a rollout."""
        (port,) = free_ports(1)
        return self._server("rollout", name, f"127.0.0.1:{port}", engine="transformers")

    def adapter(self, version: int) -> Path:
        """Return the folder in which the trainer published a version."""
        (folder,) = (self.versions / RUN).glob(f"version-{version:08d}-*")
        return folder

    def _server(self, kind: str, name: str = "", address: str = "", more: dict | None = None, **section) -> Server:
        sections: dict[str, dict[str, object]] = {
            "run": {"id": RUN, "folder": str(self.folder / f"run-{name or kind}"), "group_size": 2},
            "model": {"path": str(self.base)},
            "addresses": self._addresses | ({kind: address} if address else {}),
            "server": {"metrics": False},
            kind: section,
            **(more or {}),
        }
        server = Server(kind, self.folder, sections, name)
        self._processes.append(server)
        return server

    def close(self) -> None:
        """Kill everything."""
        for process in reversed(self._processes):
            process.close()


class Scores:
    """The process of adapter_scores.py."""

    def __init__(self, base: Path, log: Path):
        with log.open("ab") as errors:
            command = [str(python_of("trainer")), str(SCRIPT), str(base)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process, self._log = subprocess.Popen(command, stderr=errors, **pipes), log

    def of(self, adapter: Path | None, completion: list[int]) -> list[float]:
        """Return the log-probs of a completion of the cases' prompt."""
        order = {"adapter": str(adapter or ""), "prompt": cases.PROMPT.tolist(), "completion": completion}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the scores' process ended: {self._log.read_text(errors='replace')[-2000:]}"
        return json.loads(line)["log_probs"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(10)


def version_of(server: Server) -> int:
    return server.caller().call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest()).policy_version


def test_only_an_adapter_travels_and_completions_are_of_base_and_adapter_also_at_a_late_rollout(tmp_path):
    chain = Chain(tmp_path)
    scores = None
    try:
        chain.start()
        early = chain.rollout("early")
        early.wait_until(lambda: version_of(early) == STEPS, f"it has version {STEPS}", PATIENCE_SECONDS)
        late = chain.rollout("late")
        late.wait_until(lambda: version_of(late) == STEPS, f"it has version {STEPS}", PATIENCE_SECONDS)
        adapter = chain.adapter(STEPS)
        whole = sum(path.stat().st_size for path in chain.base.glob("*.safetensors"))
        assert sum(path.stat().st_size for path in adapter.glob("*.safetensors")) < whole / 5
        scores = Scores(chain.base, tmp_path / "scores.log")
        for server in (early, late):
            answer = server.caller().call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt()))
            for completion in answer.completions:
                assert {span.policy_version for span in completion.info.version_spans} == {STEPS}
                tokens, found = decode(completion.token_ids).tolist(), decode(completion.log_probs)
                np.testing.assert_allclose(found, scores.of(adapter, tokens), atol=2e-4)
                assert np.abs(found - scores.of(None, tokens)).max() > 1e-2, "the base alone would do as well"
    finally:
        if scores is not None:
            scores.close()
        chain.close()
