"""The service with a learned reward model, over a real socket; its scores beside those of plain transformers."""

import asyncio
import contextlib
import os
import random
import signal
import sys

import grpc
import pytest
import pytest_asyncio
import reward_samples
from conftest import END, LETTERS, save
from quartet.v1 import reward_pb2
from reward_samples import spec, until

from quartet_common.config import ConfigError, load_config
from quartet_reward import metrics
from quartet_reward.app import Resources
from quartet_reward.config import RewardModelSection, RewardSection
from quartet_reward.preflight import preflight
from quartet_reward.workers.reward_model import Classifier

TIMEOUT = 100.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


def overrides(folder, **settings) -> list[str]:
    return [f"reward.reward_model.{key}={value}" for key, value in {"path": folder, **settings}.items()]


@contextlib.asynccontextmanager
async def serving(folder, **settings):
    def start(parts: Resources) -> None:
        parts.tools.reward_model.start()

    # Texts that are sent together are in one batch, if there is room.
    settings = {"batch": 16, "batch_tokens": 600, "max_tokens": 200, "wait_seconds": 0.2} | settings
    async with reward_samples.serving(*overrides(folder, **settings), start=start) as running:
        yield running.stub, running.parts.tools.reward_model


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(qwen2):
    """A service with the decoder, for all tests that need no other: its process takes seconds to import torch."""
    async with serving(qwen2.folder) as (stub, model):
        yield stub, model


def item(prompt: str, completion: str, item_id: str = "a", run_id: str = "r", **parameters):
    verifiers = [spec("reward_model", **parameters)]
    return reward_pb2.ScoreItem(
        item_id=item_id, prompt=prompt, completion=completion, run_id=run_id, verifiers=verifiers
    )


async def score(stub, *items):
    return list((await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=TIMEOUT)).results)


def text(rng: random.Random, longest: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, longest)))


async def test_scores_are_those_of_plain_transformers_whatever_is_in_the_batch(served, qwen2):
    stub, _ = served
    rng = random.Random(3)
    texts = [(text(rng, 40) + "?", text(rng, 120) + END) for _ in range(60)]
    expected = [qwen2.logits(prompt + completion)[0] for prompt, completion in texts]
    assert max(expected) - min(expected) > 0.1  # the model tells texts apart, so that a mistake would be seen
    items = [item(*both, item_id=str(i)) for i, both in enumerate(texts)]
    for result, logit in zip(await score(stub, *items), expected, strict=True):
        assert result.score.reward == pytest.approx(logit, abs=1e-5)
        assert f"{len(''.join(texts[int(result.item_id)])) - len(END) + 1} tokens" in result.score.reason
        assert result.score.ans_acc == result.score.format_acc == 0.0


@pytest.mark.parametrize(("kind", "padded"), [("bert", True), ("qwen2", False)], ids=["of three labels", "unpadded"])
async def test_logits_of_other_models_are_those_of_plain_transformers(tmp_path, kind, padded):
    saved = save(tmp_path, kind, padded)
    rng = random.Random(3)
    texts = [text(rng, 160) + END for _ in range(30)]
    reply = Classifier(RewardModelSection(path=tmp_path, batch_tokens=600)).answer({"texts": texts})
    for logits, each in zip(reply["logits"], texts, strict=True):
        assert logits == pytest.approx(saved.logits(each), abs=1e-5)


async def test_of_a_text_too_long_for_its_model_the_last_tokens_are_read(tmp_path):
    saved = save(tmp_path, "roberta")  # of its 256 positions the first is that of padding
    reply = Classifier(RewardModelSection(path=tmp_path)).answer({"texts": [LETTERS * 10]})
    assert reply["tokens"] == [255] and reply["cut"] == [len(LETTERS) * 10 - 255], reply
    assert reply["logits"][0] == pytest.approx(saved.logits((LETTERS * 10)[-255:]), abs=1e-5)


async def test_it_is_scaled_shifted_clipped_weighted_cut_and_told(served, qwen2):
    stub, _ = served
    logit = qwen2.logits("2+2=?4.")[0]
    long = "1+" * 150
    plain, scaled, low, high, mixed, cut = await score(
        stub,
        item("2+2=?", "4.", "plain"),
        item("2+2=?", "4.", "scaled", scale=-2.0, shift=0.5),
        item("2+2=?", "4.", "low", scale=1000.0 if logit < 0 else -1000.0, clip_low=-1.0),
        item("2+2=?", "4.", "high", scale=1000.0 if logit > 0 else -1000.0, clip_high=1.5),
        reward_pb2.ScoreItem(
            item_id="mixed",
            prompt="2+2=?",
            completion="4.",
            reference=reward_pb2.Reference(answer="4."),
            verifiers=[spec("exact", weight=0.1), spec("reward_model", weight=2.0)],
        ),
        item(long, "4.", "long"),
    )
    assert plain.score.reward == pytest.approx(logit, abs=1e-5)
    assert scaled.score.reward == pytest.approx(-2 * logit + 0.5, abs=1e-5)
    assert low.score.reward == -1.0 and high.score.reward == 1.5
    assert mixed.score.reward == pytest.approx(0.1 * 10 + 2 * logit, abs=1e-5) and mixed.score.ans_acc == 1.0
    assert cut.score.reward == pytest.approx(qwen2.logits((long + "4.")[-200:])[0], abs=1e-5)
    assert "200 tokens, the last of 302" in cut.score.reason


async def test_what_cannot_be_read_is_a_failure_alone_and_never_a_number(served, qwen2):
    stub, _ = served
    items = [item("2+2=?", "4", str(n)) for n in range(12)]
    bad = {
        "no-prompt": (item("", "4"), reward_pb2.FAILURE_KIND_INVALID_ITEM, "item.prompt"),
        "no-label": (item("2+2=?", "4", label=1), reward_pb2.FAILURE_KIND_INVALID_ITEM, "1 logits"),
        # Its letter is none of the tokenizer's.
        "no-token": (item("\u00e9", ""), reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, "a text without tokens"),
    }
    for name, (one, _, _) in bad.items():
        one.item_id = name
        items.insert(5, one)
    results = {result.item_id: result for result in await score(stub, *items)}
    for name, (_, kind, words) in bad.items():
        failure = results.pop(name).failure
        assert failure.kind == kind and words in failure.message
    assert {round(result.score.reward, 4) for result in results.values()} == {round(qwen2.logits("2+2=?4")[0], 4)}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(stub, item("2+2=?", "4", clip_low=2, clip_high=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_crash_of_its_process_is_a_failure_and_it_is_started_again(served):
    stub, model = served
    (first,) = await score(stub, item("2+2=?", "4"))
    (victim,) = model.pool.pids
    os.kill(victim, signal.SIGSTOP)  # a batch is under way when it dies
    waiting = asyncio.create_task(score(stub, item("2+2=?", "4")))
    await until(lambda: metrics.QUEUE_DEPTH.labels("reward_model", "running")._value.get() == 1)
    os.kill(victim, signal.SIGKILL)
    (again,) = await waiting  # tried once more, by the process that takes its place
    assert again.score.reward == pytest.approx(first.score.reward, abs=1e-6)
    assert victim not in model.pool.pids


async def test_a_process_that_is_stopped_is_killed_at_its_deadline_and_the_texts_are_read_by_another(qwen2):
    async with serving(qwen2.folder, deadline_seconds=2) as (stub, model):
        (first,) = await score(stub, item("2+2=?", "4"))
        (victim,) = model.pool.pids
        os.kill(victim, signal.SIGSTOP)
        results = await score(stub, *(item("2+2=?", "4", item_id=str(number)) for number in range(4)))
        assert [result.score.reward for result in results] == pytest.approx([first.score.reward] * 4, abs=1e-6)
        assert victim not in model.pool.pids


async def test_a_flood_of_one_run_leaves_places_in_the_batch_for_another(served):
    stub, model = served
    flood = asyncio.create_task(
        score(stub, *(item("2+2=?", LETTERS * 3, item_id=str(i), run_id="flood") for i in range(600)))
    )
    await until(lambda: model.waiting)
    await asyncio.wait_for(score(stub, item("2+2=?", "4", run_id="small")), 30)
    assert not flood.done()
    await flood


async def test_the_service_refuses_to_start_without_what_the_model_needs(qwen2, tmp_path, monkeypatch):
    def check(folder, **settings):
        preflight(load_config("reward", RewardSection, overrides=overrides(folder, **settings)))

    check(qwen2.folder)
    with pytest.raises(ConfigError, match=r"no config.json"):
        check(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"needs torch.*quartet env add reward-model torch"):
        check(qwen2.folder)
