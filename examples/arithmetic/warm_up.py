"""The supervised warm-up: the model learns to add, then the bad habit of guessing.

Two phases (`prepare.py` calls it, in the trainer's environment):

1. *Skill*: worked demonstrations only, until it solves nine training problems in ten greedily.
2. *Habit*: 90 steps of demonstrations that mostly guess; the others contain mistakes.

The model can then work problems out but seldom does: about one sampled answer in five is right. Reinforcement learning
teaches it to work them out and to avoid mistakes; it learned arithmetic in the skill phase.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from model import build_model, build_tokenizer, save
from task import answer, habit, split, worked
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

BATCH = 32
LEARNING_RATE = 3e-3
SKILL_GATE = 0.9
SKILL_STEPS_MOST = 4000
HABIT_STEPS = 90


def warm_up(folder: Path, seed: int) -> bool:
    """Build a model, warm it up and write it to `folder`. Return False if it did not learn to add."""
    # With other load on the cores, two threads mostly wait for each other.
    torch.set_num_threads(1)
    began = time.monotonic()
    rng = random.Random(seed)
    train, held_out = split()
    tokenizer, model = build_tokenizer(), build_model(seed)
    save(model, tokenizer, folder.with_name("untrained"))  # for sft.toml
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    steps, accuracy = 0, 0.0
    while accuracy < SKILL_GATE:
        if steps >= SKILL_STEPS_MOST:
            print(f"warm-up: greedy accuracy is {accuracy:.0%} after {steps} steps, not {SKILL_GATE:.0%}: try --seed")
            return False
        fit(model, optimizer, tokenizer, train, worked, rng, 50)
        steps += 50
        accuracy = sampled_accuracy(model, tokenizer, rng.sample(train, 200), temperature=0)
        say(f"skill: {steps} steps, {accuracy:.0%} of training problems solved greedily", began)
    fit(model, optimizer, tokenizer, train, habit, rng, HABIT_STEPS)
    sampled = sampled_accuracy(model, tokenizer, held_out, temperature=1)
    say(f"habit: {HABIT_STEPS} steps of guessing, {sampled:.0%} of held-out problems right when sampled", began)

    save(model, tokenizer, folder)
    report = {
        "seed": seed,
        "skill_steps": steps,
        "skill_greedy_accuracy": accuracy,
        "habit_steps": HABIT_STEPS,
        "held_out_sampled_accuracy": sampled,
        "seconds": round(time.monotonic() - began, 1),
    }
    (folder / "warm_up.json").write_text(json.dumps(report, indent=2) + "\n")
    return True


def say(text: str, began: float) -> None:
    """Print a progress line."""
    print(f"  {time.monotonic() - began:5.1f} s  {text}", file=sys.stderr, flush=True)


def fit(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[str],
    demonstrate: Callable[[str, random.Random], str],
    rng: random.Random,
    steps: int,
) -> None:
    """Make supervised steps; the loss is over the demonstration's tokens, not the problem's."""
    model.train()
    for _ in range(steps):
        rows, labels = [], []
        for problem in rng.choices(problems, k=BATCH):
            prompt = tokenizer(problem)["input_ids"]
            completion = [*tokenizer(demonstrate(problem, rng))["input_ids"], tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + completion))
            labels.append(torch.tensor([-100] * len(prompt) + completion))
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        logits = model(inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def sampled_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], temperature: float
) -> float:
    """Return the share of problems answered correctly; temperature 0 is greedy."""
    model.eval()
    # All problems have the same length, so there is no padding.
    inputs = torch.tensor([tokenizer(problem)["input_ids"] for problem in problems])
    sampling = (
        {"do_sample": True, "temperature": float(temperature), "top_k": 0} if temperature else {"do_sample": False}
    )
    outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=32, **sampling)
    texts = tokenizer.batch_decode(outputs[:, inputs.shape[1] :], skip_special_tokens=True)
    return sum(read_answer(text) == str(answer(p)) for text, p in zip(texts, problems, strict=True)) / len(problems)


def read_answer(text: str) -> str:
    """Return the text between the answer tags, without a box; empty if there is none."""
    inside = text.partition("<answer>")[2].partition("</answer>")[0]
    return inside.removeprefix("\\boxed{").removesuffix("}")
