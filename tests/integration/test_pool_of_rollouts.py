"""One rollout serves two runs, one after the other, with the weights of each run's own trainer.

The second run trains an adapter, and its trainer sends only that.
"""

import json

import pytest

from quartet_client import Client

pytestmark = pytest.mark.timeout(300)

STEPS, GROUPS = 2, 2


def test_a_rollout_does_one_run_after_the_other_with_masks_that_are_trained(by_hand, tmp_path):
    common = {
        "rollout__runs": '["t*", "one"]',
        "run__sampling_masks": "true",
        "run__sampling__top_p": 0.9,
        "run__sampling__max_new_tokens": 64,
        "run__group_size": 8,
        "run__verifiers": "[{name='length', parameters={buffer_tokens=30}}]",
        "run__groups_per_step": GROUPS,
        "run__max_steps": STEPS,
        "run__max_staleness": 0,
        "trainer__learning_rate": 1e-3,
        "trainer__skip_zero_advantage": "false",
        "trainer__evaluation__interval": 0,
        "trainer__checkpoint__interval": 1,
    }
    one = by_hand(run__id="one", run__folder=tmp_path / "one", trainer__seed=1, **common)
    shared = {f"addresses__{name}": one.addresses[name] for name in ("broker", "reward", "rollout")}
    adapter = {
        "trainer__lora__r": 4,
        "trainer__lora__alpha": 8.0,
        "trainer__lora__target_modules": '["q_proj", "v_proj", "down_proj"]',
        "trainer__learning_rate": 0.05,
    }
    two = by_hand(run__id="two", run__folder=tmp_path / "two", trainer__seed=2, **shared, **common | adapter)
    one.start_redis()
    for name in ("broker", "reward", "rollout", "trainer"):
        one.start(name)
    two.start("trainer")
    first = one.client("run", "--attach", "--plain", *one.arguments)
    one.wait_for("rollout", "member of the run")
    second = two.client("run", "--attach", "--plain", *two.arguments)
    assert (first.wait(200), second.wait(200)) == (0, 0), one.logs()

    with Client(one.addresses["broker"]) as quartet:
        runs = {name: quartet.get_run(name) for name in ("one", "two")}
    for name, run in runs.items():
        assert run.stats.committed == STEPS * GROUPS
        assert run.stats.duplicates == run.stats.dead == run.stats.redelivered == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["kind"] == "step"]
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert steps[0]["train/grad_norm"] > 0, "the second step's weights are the first's"
        # The rollout's log-probs are of this run's newest weights, and rollout and trainer use the same masks.
        assert all(row["mismatch/log_prob_diff_max"] < 1e-3 and row["staleness/max"] == 0 for row in steps)
    assert one.stop("rollout") == 0, one.log("rollout")
