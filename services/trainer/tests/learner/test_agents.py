"""Groups of agents: completions of several rows with prompts of their own, seats, and credit by turn.

The expected advantages, weights and losses are written out from the messages, one row and one turn at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from learner_helpers import VOCABULARY, assert_near, gradients, make_group, make_learner
from pydantic import ValidationError
from quartet.v1 import experience_pb2, tensor_pb2
from reference import OF_GROUP, load, log_probs_of, normalized, policy_losses, token_weight

from quartet_common.tensors import decode, decode_ragged, encode, encode_ragged
from quartet_trainer.algorithms import Algorithm, Scored, read_algorithm
from quartet_trainer.batch import ExperienceBatch, ExperienceError, decode_groups
from quartet_trainer.data import without_variance

Group = experience_pb2.GroupTensors


@dataclass
class Turn:
    begin: int
    end: int
    index: int
    """Among those of its completion."""
    reward: float


@dataclass
class Row:
    prompt: list[int]
    tokens: list[int]
    turns: list[Turn]

    @property
    def sampled(self) -> list[bool]:
        return [any(turn.begin <= place < turn.end for turn in self.turns) for place in range(len(self.tokens))]


@dataclass
class Completion:
    seat: int
    outcome: float
    rows: list[Row]


def row(prompt: list[int], turns: Sequence[tuple[int, float]], tokens: Callable[[int], list[int]]) -> Row:
    """A row whose turns have these indices and rewards, with inserted tokens between them."""
    made = Row(prompt, [], [])
    for number, (index, reward) in enumerate(turns):
        if number:
            made.tokens += tokens(2)
        begin = len(made.tokens)
        made.tokens += tokens(2 + index)
        made.turns.append(Turn(begin, len(made.tokens), index, reward))
    return made


def make_agents(seed: int = 0) -> list[list[Completion]]:
    """Two groups: of a game between two seats with a sub-agent, and of four episodes that differ in length."""
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    first, second, other = drawn(5), drawn(4), drawn(7)
    game = []
    for episode in range(3):
        value = float(rng.normal())
        rows = [row(first, [(0, 0.0), (2, float(episode))], drawn), row(drawn(3), [(1, 0.25)], drawn)]
        game += [Completion(0, value, rows), Completion(1, -value, [row(second, [(0, 0.5 * episode)], drawn)])]
    same = drawn(3)  # two episodes begin alike, so that their second turns have the same state
    alike: list[Completion] = []
    for value in (1.0, 0.0):
        tokens = iter((same[:2], same[:2], drawn(3)))
        alike.append(Completion(0, value, [row(other, [(0, 0.1), (1, value)], lambda _, tokens=tokens: next(tokens))]))
    longer = Completion(0, 0.5, [row(other, [(0, -0.3), (1, 0.0), (2, 2.0)], drawn)])
    return [game, [*alike, longer, Completion(0, 0.5, [row(other, [(0, 0.0)], drawn)])]]


def to_tensors(completions: Sequence[Completion], seed: int = 0) -> Group:
    """The message, in the form of groups whose rows have prompts of their own."""
    rng = np.random.default_rng(seed)
    rows = [one for each in completions for one in each.rows]
    prompts = [list(one) for one in dict.fromkeys(tuple(one.prompt) for one in rows)]
    totals = [c.outcome + sum(t.reward for r in c.rows for t in r.turns) for c in completions]
    group = make_group(rng, [len(one.tokens) for one in rows], rewards=np.zeros(len(rows)))
    group.ClearField("prompt_token_ids")

    def ragged(values: Sequence[Sequence[Any]], dtype: int) -> tensor_pb2.RaggedTensor:
        kinds = {
            tensor_pb2.DTYPE_INT32: np.int32,
            tensor_pb2.DTYPE_FLOAT32: np.float32,
            tensor_pb2.DTYPE_UINT8: np.uint8,
        }
        return encode_ragged([np.asarray(each, kinds[dtype]) for each in values], dtype)

    int32 = tensor_pb2.DTYPE_INT32
    group.prompts.CopyFrom(ragged(prompts, int32))
    group.row_prompts.CopyFrom(encode(np.array([prompts.index(one.prompt) for one in rows], np.int32)))
    of_row = [number for number, each in enumerate(completions) for _ in each.rows]
    group.row_completions.CopyFrom(encode(np.array(of_row, np.int32)))
    group.seats.CopyFrom(encode(np.array([each.seat for each in completions], np.int32)))
    group.completion_token_ids.CopyFrom(ragged([one.tokens for one in rows], int32))
    group.loss_mask.CopyFrom(ragged([one.sampled for one in rows], tensor_pb2.DTYPE_UINT8))
    group.turn_ends.CopyFrom(ragged([[t.end for t in one.turns] for one in rows], int32))
    group.turn_indices.CopyFrom(ragged([[t.index for t in one.turns] for one in rows], int32))
    rewards = [[t.reward for t in one.turns] for one in rows]
    group.turn_rewards.CopyFrom(ragged(rewards, tensor_pb2.DTYPE_FLOAT32))
    group.outcome_rewards.CopyFrom(encode(np.array([each.outcome for each in completions], np.float32)))
    for field in (group.rewards, group.format_acc, group.ans_acc):
        field.CopyFrom(encode(np.array(totals, np.float32)))
    return group


def returns_of(completion: Completion, discount: float) -> dict[int, float]:
    """By the turn's index, the rewards from there on, the outcome with the last."""
    rewards = {turn.index: np.float32(turn.reward).item() for one in completion.rows for turn in one.turns}
    last = max(rewards)
    rewards[last] += np.float32(completion.outcome).item()
    return {t: sum(discount ** (u - t) * rewards[u] for u in rewards if u >= t) for t in rewards}


def expected_advantages(
    completions: Sequence[Completion], algorithm: str, credit: str, discount: float, weight: float
) -> list[list[list[float]]]:
    """Of each turn of each row of each completion."""
    of_group = OF_GROUP.get(algorithm, normalized)
    totals = [np.float32(c.outcome + sum(t.reward for r in c.rows for t in r.turns)).item() for c in completions]

    def among(members: Sequence[tuple[Any, float]], value: tuple[Any, float]) -> float:
        return of_group([other for _, other in members])[members.index(value)]

    turns: dict[Any, list[tuple[Any, float]]] = defaultdict(list)
    found: list[list[list[tuple[Any, Any, float]]]] = []
    for number, c in enumerate(completions):
        returns = returns_of(c, discount)
        found.append([])
        for n, one in enumerate(c.rows):
            found[-1].append([])
            for turn in one.turns:
                read = (tuple(one.prompt), tuple(one.tokens[: turn.begin]))
                key = (c.seat, turn.index) if credit == "turn" else (c.seat, read)
                name = (number, n, turn.index)
                turns[key].append((name, returns[turn.index]))
                found[-1][-1].append((key, name, returns[turn.index]))
    result = []
    for number, c in enumerate(completions):
        peers = [(other, totals[other]) for other, each in enumerate(completions) if each.seat == c.seat]
        episode = among(peers, (number, totals[number]))
        result.append(
            [
                [
                    {
                        "episode": lambda _, episode=episode: episode,
                        "turn": lambda at: among(turns[at[0]], at[1:]),
                        "gigpo": lambda at, episode=episode: episode + weight * among(turns[at[0]], at[1:]),
                    }[credit](at)
                    for at in of_row
                ]
                for of_row in found[number]
            ]
        )
    return result


def advantages_of(batch: ExperienceBatch, algorithm: Algorithm) -> np.ndarray:
    """Of the trained tokens."""
    of, nothing = batch.completion_of_token, torch.zeros(batch.rows.numel(), dtype=torch.float64)
    scored = Scored(batch.rewards.double(), batch.compared, of, batch.loss_mask, nothing, turns=batch.turns)
    return algorithm.advantages(scored).advantages[batch.loss_mask].numpy()


CREDITS = [("episode", 1.0, 1.0), ("turn", 1.0, 1.0), ("turn", 0.5, 1.0), ("gigpo", 0.9, 0.7)]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(("credit", "discount", "weight"), CREDITS)
def test_turn_advantages_equal_reference(algorithm: str, credit: str, discount: float, weight: float) -> None:
    groups = make_agents()
    batch = decode_groups([to_tensors(each) for each in groups], VOCABULARY)
    section = read_algorithm({"name": algorithm, "credit": credit, "turn_discount": discount, "state_weight": weight})
    found = advantages_of(batch, section)
    expected = [
        value
        for completions in groups
        for c, of_rows in zip(
            completions, expected_advantages(completions, algorithm, credit, discount, weight), strict=True
        )
        for one, of_turns in zip(c.rows, of_rows, strict=True)
        for turn, value in zip(one.turns, of_turns, strict=True)
        for _ in range(turn.begin, turn.end)
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert len({round(value, 6) for value in expected}) > 4


AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("algorithm", "credit"), [("grpo", "episode"), ("rloo", "turn"), ("gspo", "gigpo")])
@pytest.mark.parametrize("micro_batch_tokens", [100_000, 16])
def test_episode_loss_and_gradient_equal_reference(
    model_path: Path, algorithm: str, credit: str, aggregation: str, micro_batch_tokens: int
) -> None:
    """An episode is one sequence of the aggregation, whatever the number of its rows; a ratio is that of a row."""
    groups = make_agents()
    tensors = [to_tensors(each, seed) for seed, each in enumerate(groups)]
    bounds = {"clip_low": 0.8, "clip_high": 3.0}
    values = {
        "algorithm": algorithm,
        "credit": credit,
        "aggregation": aggregation,
        "old_log_probs": "rollout",
        **bounds,
    }
    learner = make_learner(model_path, micro_batch_tokens=micro_batch_tokens, **values)
    model = load(model_path)
    model.load_state_dict(learner._causal_lm.state_dict())
    lengths = [sum(sum(one.sampled) for one in c.rows) for group in groups for c in group]
    loss, number = torch.zeros((), dtype=torch.float64), 0
    for completions, group in zip(groups, tensors, strict=True):
        advantages = expected_advantages(completions, algorithm, credit, 1.0, 1.0)
        recorded, temperatures = decode_ragged(group.rollout_log_probs), decode(group.temperatures).tolist()
        of_rows = iter(zip(recorded, temperatures, strict=True))
        for c, of_completion in zip(completions, advantages, strict=True):
            weight = token_weight(aggregation, lengths[number], lengths, 16)
            number += 1
            for one, of_turns in zip(c.rows, of_completion, strict=True):
                rollout, temperature = next(of_rows)
                ids, kept = torch.tensor([*one.prompt, *one.tokens])[None], torch.tensor(one.sampled)
                lp, _ = log_probs_of(model, ids, torch.tensor(one.tokens), len(one.prompt), temperature)
                per_token = [
                    a for turn, a in zip(one.turns, of_turns, strict=True) for _ in range(turn.begin, turn.end)
                ]
                old = torch.tensor(rollout.copy()).double()[kept]
                loss = loss + weight * policy_losses(algorithm, lp[kept], old, per_token, 0.8, 3.0).sum()
    expected = dict(model.named_parameters())
    wanted = torch.autograd.grad(loss, list(expected.values()))
    found = gradients(learner, tensors)
    for name, gradient in zip(expected, wanted, strict=True):
        scale = 1e-9 + 1e-7 * float(gradient.abs().max())
        assert_near({name: found[name]}, {name: gradient}, rtol=1e-6, atol=scale)
    metrics = learner.train_step(tensors)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    assert (metrics["completions"], metrics["rows"], metrics["groups"]) == (10, 13, 2)
    assert (metrics["micro_batches"] > 1) == (micro_batch_tokens == 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.ClearField("turn_ends"), "turn_ends is missing; a group with prompts of its rows has it"),
        (lambda g: g.ClearField("prompts"), "row_prompts is set without prompts; allowed: together"),
        (lambda g: g.row_prompts.CopyFrom(encode(np.full(9, 9, np.int32))), "row_prompts has 9 to 9; allowed: 0 to "),
        (
            lambda g: g.row_completions.CopyFrom(encode(np.arange(9, dtype=np.int32)[::-1].copy() % 6)),
            "row_completions decreases; the rows of a completion follow one another",
        ),
        (lambda g: g.seats.CopyFrom(encode(np.zeros(4, np.int32))), "seats has 4 values; expected: 6"),
        (
            lambda g: g.outcome_rewards.CopyFrom(encode(np.zeros(9, np.float32))),
            "outcome_rewards has 9 values for 6 completions",
        ),
        (lambda g: g.turn_ends.lengths.append(0), "turn_indices has other row lengths than turn_ends"),
        (
            lambda g: g.turn_ends.CopyFrom(encode_ragged([np.ones(n, np.int32) for n in g.turn_ends.lengths], 2)),
            "turn_ends does not ascend to the length of its row",
        ),
        (
            lambda g: g.turn_indices.CopyFrom(encode_ragged([np.ones(n, np.int32) for n in g.turn_ends.lengths], 2)),
            "turn_indices does not number the turns of each completion from 0, each once",
        ),
    ],
)
def test_groups_whose_rows_and_turns_do_not_fit_are_refused(change: Callable[[Group], Any], message: str) -> None:
    group = to_tensors(make_agents()[0])
    assert list(group.row_prompts.shape) == [9] and group.turn_ends.dtype == tensor_pb2.DTYPE_INT32 == 2
    change(group)
    with pytest.raises(ExperienceError) as refusal:
        decode_groups([group], VOCABULARY)
    assert message in str(refusal.value)


def test_bytes_that_are_changed_at_random_are_refused_or_harmless() -> None:
    chance, outcomes = np.random.default_rng(1), set()
    data = to_tensors(make_agents()[0]).SerializeToString()
    section = read_algorithm({"name": "grpo", "credit": "gigpo"})
    for _ in range(2000):
        changed = bytearray(data)
        for place in chance.integers(len(data), size=chance.integers(1, 3)):
            changed[place] = chance.integers(256)
        try:
            batch = decode_groups([Group.FromString(bytes(changed))], VOCABULARY)
        except (DecodeError, ExperienceError) as refusal:
            outcomes.add(type(refusal))
            continue
        assert np.isfinite(advantages_of(batch, section)).all()
        outcomes.add(None)
    assert outcomes == {DecodeError, ExperienceError, None}


def test_a_completion_without_turns_is_one_turn() -> None:
    rng = np.random.default_rng(3)
    groups = [make_group(rng, [4, 3, 5]), to_tensors(make_agents()[1])]
    turns = decode_groups(groups, VOCABULARY).turns
    assert turns.completions.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5, 5, 6]
    assert turns.returns(0.5)[:3].tolist() == decode(groups[0].rewards).tolist()
    assert turns.states.tolist() == [0, 0, 0, 1, 2, 1, 2, 1, 3, 4, 1]


def test_groups_without_variance_are_those_of_equal_rewards_in_each_seat() -> None:
    def group(rewards: list[float], seats: list[int], turns: float = 0.0) -> Group:
        made = Group(rewards=encode(np.array(rewards, np.float32)), seats=encode(np.array(seats, np.int32)))
        made.turn_rewards.CopyFrom(encode_ragged([np.array([turns], np.float32)], tensor_pb2.DTYPE_FLOAT32))
        return made

    groups = {
        "always won by one seat": group([1, -1, 1, -1], [0, 1, 0, 1]),
        "sometimes": group([1, -1, -1, 1], [0, 1, 0, 1]),
        "with rewards of turns": group([1, -1, 1, -1], [0, 1, 0, 1], 0.5),
    }
    assert without_variance(groups, by_turn=False) == ["always won by one seat", "with rewards of turns"]
    assert without_variance(groups, by_turn=True) == ["always won by one seat"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "ppo", "credit": "turn"}, "credit: ppo has an advantage of its own for each token; allowed: episode"),
        ({"name": "grpo", "credit": "turn", "kl_in": "reward"}, "credit: kl_in = 'reward' changes the reward of whole"),
        ({"name": "grpo", "credit": "gigpo", "reward_clip": 5.0}, "credit: reward_clip changes the reward of whole"),
    ],
)
def test_credit_by_turn_is_refused_where_it_has_no_meaning(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_algorithm(values)
