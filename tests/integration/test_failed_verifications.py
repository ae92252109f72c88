"""A verifier that fails on some prompts, in a run of real services: they are set aside, and no number is made up."""

import json

import pytest
from by_hand import SERVICES

from quartet_client import Client

pytestmark = pytest.mark.timeout(300)

# A user's own verifier, as an installer leaves it. It cannot judge prompts whose reference is 2; once it also fails in
# passing, which is to be healed by trying again.
FAULTY = """
from quartet.v1 import reward_pb2
from quartet_reward.failures import VerifierFailure
from quartet_reward.verifiers.base import Parameters, Verdict


class Faulty:
    name = "faulty"
    description = "The length of the completion; fails where the reference is 2, and once in passing."
    parameters = Parameters
    failed = set()

    def verify(self, item, parameters, tools):
        if item.reference.answer == "2":
            raise RuntimeError("I cannot judge this")
        if item.reference.answer not in self.failed:
            self.failed.add(item.reference.answer)
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE, "in passing")
        return Verdict(float(len(item.completion)), reward_pb2.OUTCOME_CORRECT, "its length")
"""


def test_a_failure_is_retried_given_back_and_set_aside_and_never_becomes_a_number(by_hand, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(FAULTY)
    information = tmp_path / "faulty-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[quartet.verifiers]\nfaulty = faulty:Faulty\n")
    services = by_hand(
        run__verifiers="[{name = 'faulty'}]",
        run__max_deliveries=2,
        run__max_steps=3,
        data__passes=1,
        rollout__engine="transformers",
        rollout__scoring__attempts=2,
        rollout__scoring__backoff_seconds=0.05,
        trainer__evaluation__interval=0,
    )
    services.start_redis()
    for name in SERVICES:
        with monkeypatch.context() as patch:
            if name == "reward":
                patch.setenv("PYTHONPATH", str(tmp_path))
            services.start(name)
    client = services.client("run", "--attach", "--plain", *services.arguments)
    assert client.wait(200) == 0, services.logs()

    with Client(services.addresses["broker"]) as quartet:
        dead, total = quartet.dead("by-hand")
        run = quartet.run("by-hand")
    assert total == len(dead) == run.stats.dead > 0
    for prompt in dead:
        assert "verifier 'faulty' raised RuntimeError: I cannot judge this" in str(prompt)
        assert "(attempt 2 of 2)" in str(prompt)
    # What was trained has the verifier's own numbers: no completion of the demo's model is without a character.
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 3 and all(row["reward/mean"] >= 1 for row in steps)
    # The failures in passing were healed, and said: one completion of each other reference.
    assert "in passing" not in str(dead)
