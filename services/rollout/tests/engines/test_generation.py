"""Contract of every engine: what is generated, with which log-probs, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from harness import FORMS, PATIENCE, PROMPT, PROMPTS, Harness
from models import EOS, VOCAB_SIZE

from quartet_rollout.engines import EngineCompletion, PromptError, SamplingSettings
from quartet_rollout.generation import not_taken

TOLERANCE = 1e-4
pytestmark = [
    pytest.mark.timeout(2 * PATIENCE),
    pytest.mark.parametrize("loaded", FORMS[:2], indirect=True, scope="session"),
]


def test_serves_more_groups_than_it_has_places_with_every_completion_once_and_counts_tokens(harness: Harness) -> None:
    async def many() -> list:
        sampling = SamplingSettings(max_new_tokens=8)
        return await asyncio.gather(*(harness.collect([*PROMPT, i], 10, sampling) for i in range(8)))

    before = harness.engine.stats().tokens_total
    groups = harness.run(many())
    stats = harness.engine.stats()
    assert stats.tokens_total == before + sum(len(one.token_ids) for group in groups for one in group)
    assert stats.running == stats.waiting == 0 and (stats.kv_cache_use == -1.0 or 0.0 <= stats.kv_cache_use <= 1.0)
    for i, group in enumerate(groups):
        assert [completion.index for completion in group] == list(range(10))
        assert len({completion.token_ids.tobytes() for completion in group}) > 1
        for completion in group:
            assert completion.token_ids.dtype == np.int32 and completion.log_probs.dtype == np.float32
            assert 1 <= len(completion.token_ids) == len(completion.log_probs) <= 8
            assert completion.version_spans == ((0, 0, len(completion.token_ids)),)
            expected = harness.log_probs(harness.folders[0], [*PROMPT, i], completion.token_ids)
            np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE)


def _filtered(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The filters' definition, row by row."""
    logits = logits.clone()
    for row in logits:
        probs = row.softmax(-1)
        row[probs < min_p * probs.max()] = float("-inf")
        order = row.argsort(descending=True)
        if top_k:
            row[order[top_k:]] = float("-inf")
        mass, probs = 0.0, row.softmax(-1)
        for candidate in order:
            if mass >= top_p:
                row[candidate] = float("-inf")
            mass += float(probs[candidate])
    return logits


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 5}], ids=["all", "temperature and top_k"])
def test_tokens_are_drawn_as_often_as_they_are_likely(harness: Harness, settings: dict) -> None:
    draws = 500
    completions = harness.generate(n=draws, max_new_tokens=1, seed=100, **settings)
    drawn = np.bincount([completion.token_ids[0] for completion in completions], minlength=VOCAB_SIZE)
    filters = {key: value for key, value in settings.items() if key != "temperature"}
    logits = harness.logits(harness.folders[0], PROMPT, np.array([0])) / settings.get("temperature", 1.0)
    expected = draws * _filtered(logits, **filters)[0].double().softmax(-1).numpy()
    assert drawn[expected == 0].sum() == 0
    # Pearson's test; what is expected less than five times counts as one. The seeds make it the same each time.
    often = expected >= 5
    seen, awaited = (np.append(one[often], one[~often].sum()) for one in (drawn, expected))
    seen, awaited = seen[awaited > 0], awaited[awaited > 0]
    freedom = len(seen) - 1
    assert freedom >= 1
    assert ((seen - awaited) ** 2 / awaited).sum() < freedom + 8 * np.sqrt(2 * freedom)


def _candidates(completion: EngineCompletion) -> list[list[int]]:
    """The mask, token by token; an empty list stands for the whole vocabulary."""
    mask = completion.mask
    assert mask is not None and mask.counts.dtype == mask.token_ids.dtype == np.int32
    assert len(mask.counts) == len(completion.token_ids) and mask.counts.sum() == len(mask.token_ids)
    return [ids.tolist() for ids in np.split(mask.token_ids, mask.counts.cumsum()[:-1])]


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_log_probs_and_masks_are_those_of_what_the_filters_leave(harness: Harness, filters: dict) -> None:
    drawn = {"n": 4, "temperature": 0.5, "max_new_tokens": 12, "seed": 3, **filters}
    masked, plain = (harness.generate(masks=masks, **drawn) for masks in (True, False))
    for completion, without in zip(masked, plain, strict=True):
        logits = _filtered(harness.logits(harness.folders[0], PROMPT, completion.token_ids) / 0.5, **filters)
        assert _candidates(completion) == [row.nonzero()[:, 0].tolist() for row in logits > float("-inf")]
        every = torch.log_softmax(logits, dim=-1)
        expected = every.gather(-1, torch.tensor(completion.token_ids, dtype=torch.int64)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE)
        np.testing.assert_array_equal(without.token_ids, completion.token_ids)
        np.testing.assert_allclose(without.log_probs, expected, atol=TOLERANCE)
        assert without.mask is None


def test_a_mask_is_empty_where_nothing_was_cut_off_and_absent_where_nothing_could_be(harness: Harness) -> None:
    assert all(c.mask is None for c in harness.generate(n=2, max_new_tokens=4, masks=True))
    assert all(c.mask is None for c in harness.generate(max_new_tokens=4, top_k=3, temperature=0.0, masks=True))
    for completion in harness.generate(n=2, max_new_tokens=4, min_p=1e-30, masks=True):
        assert _candidates(completion) == [[]] * len(completion.token_ids)


def test_masks_go_on_through_an_update_that_recomputes_the_kv_cache(harness: Harness) -> None:
    async def body() -> list:
        sampling = SamplingSettings(max_new_tokens=900, temperature=0.3, top_k=7, masks=True)
        others = SamplingSettings(max_new_tokens=900, temperature=0.3, top_k=2)
        reading = [asyncio.create_task(harness.collect([*PROMPT, i], 6, s)) for i, s in enumerate((sampling, others))]
        await harness.started(40)
        await harness.update(harness.folders[1], 1)
        return await asyncio.gather(*reading)

    masked, unmasked = harness.run(body())
    assert {version for completion in masked for version, _, _ in completion.version_spans} == {0, 1}
    assert all(completion.mask is None for completion in unmasked)
    for completion in masked:
        candidates = _candidates(completion)
        assert all(len(ids) == 7 for ids in candidates)
        assert all(token in ids for token, ids in zip(completion.token_ids.tolist(), candidates, strict=True))
        for version, begin, end in completion.version_spans:
            logits = harness.logits(harness.folders[version], [*PROMPT, 0], completion.token_ids)[begin:end]
            # Seven of the likeliest; which of two that are as good as equal is left to rounding.
            for row, ids in zip(logits, candidates[begin:end], strict=True):
                assert row[ids].min() >= row.topk(7).values[-1] - TOLERANCE


def test_temperature_zero_is_greedy_with_the_models_own_log_probs_beside_rows_of_other_sampling(
    harness: Harness,
) -> None:
    async def both() -> tuple:
        settings = SamplingSettings(temperature=0.0, max_new_tokens=16), SamplingSettings(temperature=0.5, top_k=9)
        return await asyncio.gather(*(harness.collect(PROMPT, 4, sampling) for sampling in settings))

    tokens = harness.greedy(harness.folders[0], PROMPT, 16)
    greedy, _ = harness.run(both())
    for completion in greedy:
        np.testing.assert_array_equal(completion.token_ids, tokens[: len(completion.token_ids)])
        log_probs = harness.log_probs(harness.folders[0], PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, log_probs, atol=TOLERANCE)


def test_ends_at_the_end_of_sequence_and_at_the_length_limit(harness: Harness) -> None:
    completions = harness.generate(n=48, max_new_tokens=48)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        ended = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == EOS) == ended
        assert EOS not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 48


def test_ends_at_a_stop_token_and_keeps_it(harness: Harness) -> None:
    tokens = harness.greedy(harness.folders[0], PROMPT, 10).tolist()
    stop = tokens[5]
    (completion,) = harness.generate(temperature=0.0, max_new_tokens=10, stop_token_ids=(stop,))
    assert completion.finish_reason == "stop"
    assert completion.token_ids.tolist() == tokens[: tokens.index(stop) + 1]


def test_ends_at_a_stop_string_special_tokens_included_and_keeps_it(harness: Harness) -> None:
    tokenizer = harness.engine.tokenizer()
    for completion in harness.generate(n=8, max_new_tokens=20, seed=5):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        stop = tokenizer.decode(completion.token_ids[2:5], skip_special_tokens=False)
        if "�" in text or len(completion.token_ids) < 12:
            continue
        seed = 5 + completion.index
        (stopped,) = harness.generate(max_new_tokens=20, seed=seed, stop=("never there", stop))
        assert stopped.finish_reason == "stop"
        assert tokenizer.decode(stopped.token_ids, skip_special_tokens=False) == text[: text.index(stop) + len(stop)]
        return
    pytest.fail("no completion was long enough to take a stop string from")


def test_a_full_context_ends_a_completion(harness: Harness) -> None:
    prompt = [7] * (harness.engine.max_model_len - 5)
    completions = harness.generate(prompt, n=4, max_new_tokens=100)
    assert any(len(c.token_ids) == 5 and c.finish_reason == "length" for c in completions)
    assert all(len(c.token_ids) <= 5 for c in completions)


def test_says_what_is_wrong_with_a_prompt(harness: Harness) -> None:
    longest = harness.engine.max_model_len
    for prompt, words in (([1] * longest, f"at most {longest - 1}"), ([1, VOCAB_SIZE], f"0 to {VOCAB_SIZE - 1}")):
        with pytest.raises(PromptError, match=words):
            harness.generate(prompt, max_new_tokens=4)


def _altered(logits: torch.Tensor, prompt: list[int], output: np.ndarray, **sampling: Any) -> torch.Tensor:
    """vLLM's definition, token by token: biases, then penalties of the tokens that are there already."""
    logits = logits.clone()
    for step, row in enumerate(logits):
        there = set(output[:step].tolist())
        for token, bias in sampling.get("logit_bias", {}).items():
            row[token] += bias
        for token in there | set(prompt):
            row[token] *= sampling["repetition_penalty"] ** (-1 if row[token] > 0 else 1)
        for token in there:
            row[token] -= sampling["presence_penalty"]
    return logits


def test_later_parameters_are_taken_as_vllm_defines_them_or_the_engine_does_not_claim_them(harness: Harness) -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {50: 2.0, EOS: -100.0}}
    forced = {"logit_bias": {EOS: 100.0, 33: 90.0}, "bad_words": ("A",), "min_tokens": 3}
    if harness.engine.name != "vllm":
        assert set(not_taken(harness.engine, SamplingSettings(**penalties))) == set(penalties)
        return
    assert not not_taken(harness.engine, SamplingSettings(**penalties | forced))
    for completion in harness.generate(n=3, max_new_tokens=24, **penalties):
        logits = harness.logits(harness.folders[0], PROMPT, completion.token_ids)
        expected = torch.log_softmax(_altered(logits, PROMPT, completion.token_ids, **penalties), dim=-1)
        tokens = torch.tensor(completion.token_ids, dtype=torch.int64)
        np.testing.assert_allclose(completion.log_probs, expected.gather(-1, tokens[:, None])[:, 0], atol=TOLERANCE)
    (completion,) = harness.generate(max_new_tokens=24, temperature=0.0, **forced)
    assert (len(completion.token_ids), completion.token_ids[-1]) == (4, EOS) and 33 not in completion.token_ids


def test_a_seed_gives_the_same_completions_in_any_company(harness: Harness) -> None:
    first = harness.generate(n=4, max_new_tokens=20, seed=11)
    assert len({completion.token_ids.tobytes() for completion in first}) > 1

    async def in_company() -> list:
        others = asyncio.create_task(harness.collect([3, 4], 6, SamplingSettings(max_new_tokens=30)))
        seeded = await harness.collect(PROMPT, 4, SamplingSettings(max_new_tokens=20, seed=11))
        await others
        return seeded

    for a, b in zip(first, harness.run(in_company()), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    (third,) = harness.generate(n=1, max_new_tokens=20, seed=13)
    np.testing.assert_array_equal(third.token_ids, first[2].token_ids)  # Completion i has seed + i.


def test_leaving_the_iterator_aborts_the_rest(harness: Harness) -> None:
    async def body() -> None:
        sampling = SamplingSettings(max_new_tokens=2000, temperature=0.2)
        for tokens in (0, 16):  # Before it has been admitted, and later.
            reading = asyncio.create_task(harness.collect(PROMPT, 16, sampling))
            await asyncio.sleep(0)
            if tokens:
                await harness.started(tokens)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await harness.until(lambda: harness.engine.stats().running == 0)

    harness.run(body())


def test_log_probs_of_a_completion_are_the_models_own(harness: Harness) -> None:
    """Whatever it was sampled at, from its first token to the last before the end of the context, many at once."""
    longest = harness.engine.max_model_len - 1
    completions = [PROMPTS[1], list(range(5, 60)), [7] * (longest - len(PROMPT))]

    async def ask(completion: list[int]) -> np.ndarray:
        return await harness.engine.log_probs("test", [*PROMPT, *completion], len(PROMPT))

    async def all_at_once() -> list[np.ndarray]:
        await harness.engine.pause("keep")
        asking = [asyncio.create_task(ask(completion)) for completion in completions * 2]
        await harness.engine.resume()
        return await asyncio.gather(*asking)

    for completion, found in zip(completions * 2, harness.run(all_at_once()), strict=True):
        expected = harness.log_probs(harness.folders[0], PROMPT, np.array(completion))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    for wrong, message in (([VOCAB_SIZE], "token id"), ([7] * (longest - len(PROMPT) + 1), "at most")):
        with pytest.raises(PromptError, match=message):
            harness.run(ask(wrong))
