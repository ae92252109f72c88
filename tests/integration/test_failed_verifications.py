"""A verifier that raises on half of the completions, in a run of real services, and then is mended: what is trained and
evaluated are the completions that were drawn first, all of them.
"""

import json
import statistics
import time
import zlib

import pytest
from by_hand import SERVICES

from quartet_client import Client, Handle

pytestmark = pytest.mark.timeout(600)

# A user's own verifier, as an installer leaves it. It also fails once for each reference in passing, and never finishes
# with some training prompts (an evaluation has fewer tokens): so the data does not end while the others are set aside.
FAULTY = """
import asyncio
import zlib

from quartet.v1 import reward_pb2
from quartet_reward.failures import VerifierFailure
from quartet_reward.verifiers.base import Parameters, Verdict


class Faulty:
    name = "faulty"
    description = "The length of the completion."
    parameters = Parameters
    failed = set()

    def verify(self, item, parameters, tools):
        if item.reference.answer == "2" and item.max_new_tokens == 32:
            return asyncio.Event().wait
        if item.reference.answer not in self.failed:
            self.failed.add(item.reference.answer)
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE, "in passing")
        if zlib.crc32(item.completion.encode()) % 2:
            raise KeyError("an odd one")
        length = len(item.completion)
        return Verdict(float(length), reward_pb2.OUTCOME_CORRECT, "its length", ans_acc=length % 3 / 2)
"""
RAISES = FAULTY.splitlines().index('            raise KeyError("an odd one")') + 1
MENDED = FAULTY.replace('raise KeyError("an odd one")', "pass").replace("item.max_new_tokens == 32", "False")
PROMPTS = 30
TRAINED = [f"pass-0/{n}" for n in range(PROMPTS)]
UNANSWERED = 2


def odd(text: str) -> bool:
    return bool(zlib.crc32(text.encode()) % 2)


def test_what_a_mended_verifier_scores_was_drawn_before(by_hand, tmp_path, monkeypatch):
    module = tmp_path / "faulty.py"
    module.write_text(FAULTY)
    information = tmp_path / "faulty-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[quartet.verifiers]\nfaulty = faulty:Faulty\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the reward service; the others do not look there
    services = by_hand(
        broker__max_first_dead=0,  # fifteen of sixteen are set aside: the first ones may well be
        run__verifiers="[{name = 'faulty'}]",
        run__groups_per_step=PROMPTS,  # no step without those that are set aside
        run__max_steps=1,
        run__evaluation_sampling__max_new_tokens=31,
        server__drain_seconds=2,
        data__passes=1,
        rollout__scoring__attempts=2,
        rollout__scoring__backoff_seconds=0.05,
        trainer__evaluation__interval=0,
    )
    services.start_redis()
    for name in SERVICES:
        services.start(name)
    client = services.client("run", "--attach", "--plain", *services.arguments)
    raised = f"error: verifier 'faulty' raised KeyError: 'an odd one' ({module}:{RAISES})\n    Traceback"
    services.wait_for("client", raised, "evaluation heldout at version 0: incomplete:", seconds=240)

    with Client(services.addresses["broker"]) as quartet:
        deadline = time.monotonic() + 60
        while (stats := quartet.run("by-hand").stats).queued or stats.leased > UNANSWERED:
            assert time.monotonic() < deadline and client.poll() is None, services.logs()
            time.sleep(0.2)
        drawn, total = set_aside(quartet)
        assert total > PROMPTS, "of a group of four hardly one in sixteen is spared"

        # What could be scored stands; the evaluation has no figure.
        row = baseline(tmp_path)
        assert row["eval/heldout/dead"] > 0 and "eval/heldout/ans_acc" not in row
        spared = lines(tmp_path)
        assert all(not odd(line["prediction"]) for line in spared)
        held = [line["prediction"] for line in spared]
        held += [text for name, texts in drawn.items() if name.startswith("heldout") for text in texts]
        drawn |= results(quartet, [name for name in TRAINED if quartet.place(Handle("by-hand", name)).state == "ready"])
        drawn = {name: texts for name, texts in drawn.items() if name in TRAINED}
        assert len(drawn) == PROMPTS - UNANSWERED

    # The verifier is mended, and the run resumed.
    assert services.stop("reward") == 0 and services.stop("trainer") == 0, services.logs()
    module.write_text(MENDED)
    services.start("reward")
    services.start("trainer")
    services.wait_for("client", f"{total} groups that no verifier could score will be scored again")
    assert client.wait(120) == 0, services.logs()

    with Client(services.addresses["broker"]) as quartet:
        run = quartet.run("by-hand")
        assert (run.stats.committed, run.stats.dead, run.stats.stale, run.stats.redelivered) == (PROMPTS, 0, 0, 0)
        trained = results(quartet, TRAINED)
    assert {name: trained[name] for name in drawn} == drawn, "each completion as it was drawn"
    rewards = [len(text) for texts in trained.values() for text in texts]
    (step,) = [row for row in rows(tmp_path) if row["kind"] == "step"]
    assert step["reward/mean"] == pytest.approx(statistics.mean(rewards), rel=1e-5)

    assert sorted(line["prediction"] for line in lines(tmp_path)) == sorted(held) and len(held) == PROMPTS
    truth = statistics.mean(len(text) % 3 / 2 for text in held)
    row = baseline(tmp_path)
    assert row["eval/heldout/ans_acc"] == pytest.approx(truth) and row["eval/heldout/dead"] == 0


def set_aside(quartet: Client) -> tuple[dict[str, list[str]], int]:
    """Return the texts that are kept of each dead prompt, after one delivery each, and how many are dead."""
    dead, total = quartet.dead("by-hand", limit=1000)
    assert all(prompt.attempts == 1 and prompt.unscored_bytes for prompt in dead)
    assert all(f"faulty.py:{RAISES}) (attempt 2 of 2)" in reason for prompt in dead for reason in prompt.reasons)
    kept = {}
    for prompt in dead:
        completions = quartet.unscored(Handle("by-hand", prompt.instance_id)).completions
        assert all(odd(each.text) for each in completions if each.score is None)
        kept[prompt.instance_id] = [each.text for each in completions]
    return kept, total


def results(quartet: Client, names: list[str]) -> dict[str, list[str]]:
    """Return the texts of finished groups."""
    groups = quartet.results([Handle("by-hand", name) for name in names]) if names else []
    return {group.instance_id: [each.text for each in group.completions] for group in groups}


def rows(folder) -> list[dict]:
    """What metrics.jsonl has."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def baseline(folder) -> dict:
    """The evaluation at version 0; made again after the resume, its last row counts."""
    return [row for row in rows(folder) if row["kind"] == "evaluation" and row["policy_version"] == 0][-1]


def lines(folder) -> list[dict]:
    """What is written of the completions of the evaluation at version 0."""
    path = folder / "run" / "evaluations" / "heldout-step-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
