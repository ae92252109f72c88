"""A run whose completions an agent plays over HTTP: real services, vLLM's endpoint, an unmodified `openai` client."""

import signal
from pathlib import Path

import pytest
from preloaded import Pythons

from quartet_client import Client
from quartet_common.ports import free_port

pytestmark = pytest.mark.timeout(400)

STEPS, GROUPS, COMPLETIONS = 4, 2, 4
AGENT = """
from quartet_environment import Endpoint, Reward, Seat, Task


async def play(task: Task, endpoint: Endpoint, *, turns: int) -> Reward:
    text, said = task.messages[0]["content"], ""
    whole = {"extra_body": {"skip_special_tokens": False}}
    judge, endpoint = endpoint.seat("judge"), endpoint.seat("writer")
    for turn in range(turns):
        if turn:
            text += "\\n"
        if turn % 2:
            stream = await endpoint.client.completions.create(
                model=endpoint.model, prompt=text, stream=True, **whole
            )
            said = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        else:
            answer = await endpoint.client.completions.create(model=endpoint.model, prompt=text, **whole)
            said = answer.choices[0].text
        text += said
    await judge.client.completions.create(model=judge.model, prompt="good?")
    fresh = await endpoint.client.completions.create(model=endpoint.model, prompt="2+2=")  # another conversation
    digits = sum(character.isdigit() for character in said)
    value = {"digits": digits / 10, "length": (len(said) / 100, 0.5)}
    writer = Seat("writer", value, turns=[0.0, None, 0.1, len(fresh.choices[0].text) / 10])
    return Reward(seats=[writer, Seat("judge", trainable=False)])
"""


def test_episodes_are_trained_exactly_once_though_their_service_is_killed(by_hand, pythons: Pythons, tmp_path: Path):
    (tmp_path / "agent.py").write_text(AGENT)
    services = by_hand(
        run_file="agent.toml",
        run__environment=f'{{ file = "{tmp_path}/agent.py:play", parameters = {{ turns = 3 }} }}',
        run__sampling__max_new_tokens=8,
        run__group_size=COMPLETIONS,
        run__groups_per_step=GROUPS,
        run__max_steps=STEPS,
        rollout__engine="vllm",
        rollout__http__address=f"127.0.0.1:{free_port()}",
        trainer__skip_zero_advantage="false",
        trainer__algorithm='{ name = "grpo", credit = "turn" }',
        trainer__evaluation__interval=0,
        trainer__evaluation__before_training="false",
        trainer__evaluation__at_end="false",
    )
    services.pythons = {name: pythons[name] for name in ("broker", "reward", "trainer", "environment", "client")}
    services.pythons["rollout"] = pythons["vllm"]
    services.start_redis()
    for name in ("broker", "reward", "trainer", "environment", "rollout"):
        services.start(name)
    client = services.client("run", "--attach", "--plain", *services.arguments)
    services.wait_for("client", "step 1/")
    services.stop("environment", signal.SIGKILL)
    services.start("environment")
    assert client.wait(250) == 0, services.logs()

    checkpoints = tmp_path / "run" / "checkpoints"
    words = ("audit", "by-hand", "--broker", services.addresses["broker"], "--checkpoints", str(checkpoints))
    assert services.client(*words).wait(60) == 0, services.log("client")
    with Client(services.addresses["broker"]) as quartet:
        stats = quartet.get_run("by-hand").stats
    assert stats.committed == STEPS * GROUPS and stats.duplicates == stats.dead == 0

    steps = services.rows("step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    for row in steps:
        assert 0 < row["batch/trained_tokens"] < row["batch/completion_tokens"]  # what is between turns is inserted
        assert row["batch/completions"] == GROUPS * COMPLETIONS
        # Two conversations each; rarely a text's tokens do not split where a turn ended, and another one begins.
        assert 2 <= row["batch/rows"] / row["batch/completions"] <= 3
        assert row["reward/writer/digits/mean"] >= 0 and row["reward/writer/length/mean"] > 0
        assert row["reward/writer/turns/mean"] > 0.1
    # The trainer's log-probs equal those recorded over HTTP, of streamed turns too.
    assert steps[0]["mismatch/log_prob_diff_max"] < 1e-4
