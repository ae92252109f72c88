"""Makes the files of `run.toml`: word problems, a BPE tokenizer trained on them, and a warmed-up model.

    .quartet/envs/trainer/bin/python examples/word_problems/prepare.py .quartet/word_problems

The warm-up has two phases, by supervised learning:

1. *Skill*: worked completions only, until it solves nine training problems in ten greedily.
2. *Habit*: steps on completions that mostly guess; the others contain mistakes.

The model can then think but seldom does, so that rewards are neither all 0 nor all 1. An existing model is kept.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from problems import Problem, split
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
THINKING = ("<think>", "</think>")
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""
"""As Qwen3's: without thinking, the prompt already contains empty thoughts."""

CONTEXT = 256
BATCH = 32
GREEDY = 128  # problems with which greedy accuracy is measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=768, help="of the model: a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--skill", type=float, default=0.9, help="greedy accuracy that ends the first phase")
    parser.add_argument("--skill-steps", type=int, default=1500, help="at most")
    parser.add_argument("--habit-steps", type=int, default=60)
    parser.add_argument("--train", type=int, default=4096, metavar="PROBLEMS")
    parser.add_argument("--heldout", type=int, default=128, metavar="PROBLEMS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (options.folder / "model" / "warm_up.json").is_file():
        print(f"kept: {options.folder}", file=sys.stderr)
        return 0
    # With other load on the cores, two threads mostly wait for each other.
    torch.set_num_threads(1)
    train, held_out = split(options.train, options.heldout)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("heldout", held_out)):
        write_problems(options.folder / f"{name}.jsonl", problems)
    return 0 if Warmup(options, train, held_out).run() else 1


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object per line: a user's turn and the reference answer."""
    rows = ({"messages": {"role": "user", "content": one.text}, "gt_answer": str(one.answer)} for one in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_tokenizer(problems: list[Problem]) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer of Qwen's form on the problems and their worked completions."""
    texts = (f"{one.text}\n{one.worked()}" for one in problems)
    roles = ["system\n", "user\n", "assistant\n"]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator([*texts, *roles * 100], vocab_size=2048)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(list(THINKING))
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, SPECIAL[0]
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def build_model(width: int, layers: int, tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """Return a freshly initialized float32 model of Qwen3's architecture."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 192),
            head_dim=64,
            intermediate_size=3 * width,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )


class Warmup:
    """The warm-up of one model."""

    def __init__(self, options: argparse.Namespace, train: list[Problem], held_out: list[Problem]):
        torch.manual_seed(options.seed)
        self.options, self.train, self.held_out = options, train, held_out
        self.rng = random.Random(options.seed)
        self.tokenizer = build_tokenizer(train)
        self.model = build_model(options.width, options.layers, self.tokenizer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98))
        self.began = time.monotonic()

    def run(self) -> bool:
        """Warm up the model and write its folder. Return False if it did not learn the skill."""
        parameters = sum(one.numel() for one in self.model.parameters())
        self.say(f"{parameters / 1e6:.1f} M parameters, {len(self.tokenizer)} tokens")
        steps = 0
        while True:
            self.fit(Problem.worked, 50, warming=steps == 0)
            steps += 50
            greedy = self.accuracy(self.rng.sample(self.train, min(GREEDY, len(self.train))), sampled=False)
            self.say(f"skill: {steps} steps, {greedy:.0%} of training problems solved greedily")
            if greedy >= self.options.skill:
                break
            if steps >= self.options.skill_steps:
                print(f"that is not {self.options.skill:.0%}: try --seed or more --skill-steps", file=sys.stderr)
                return False
        self.fit(lambda problem: problem.habit(self.rng), self.options.habit_steps)
        sampled = self.accuracy(self.held_out, sampled=True)
        self.say(f"habit: {self.options.habit_steps} steps, {sampled:.0%} of held-out problems right when sampled")
        folder = self.options.folder / "model"
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        report = {
            "parameters": parameters,
            "tokens": len(self.tokenizer),
            "skill_steps": steps,
            "held_out_sampled_accuracy": sampled,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        (folder / "warm_up.json").write_text(json.dumps(report, indent=2) + "\n")
        return True

    def say(self, text: str) -> None:
        """Print a progress line."""
        print(f"  {time.monotonic() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def prompt(self, problem: Problem) -> list[int]:
        """Return a prompt's token ids, as in the run."""
        turn = [{"role": "user", "content": problem.text}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    def fit(self, demonstrate: Callable[[Problem], str], steps: int, warming: bool = False) -> None:
        """Make supervised steps; the loss is over the completion's tokens, not the prompt's."""
        self.model.train()
        for step in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * (min(1.0, (step + 1) / 20) if warming else 1.0)
            rows, labels = [], []
            for problem in self.rng.choices(self.train, k=BATCH):
                prompt = self.prompt(problem)
                answer = self.tokenizer(demonstrate(problem) + END_OF_TURN)["input_ids"]
                rows.append(torch.tensor(prompt + answer))
                labels.append(torch.tensor([-100] * len(prompt) + answer))
            inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
            targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)[:, 1:]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(inputs).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def accuracy(self, problems: list[Problem], sampled: bool) -> float:
        """Return the share of problems answered correctly."""
        self.model.eval()
        prompts = [torch.tensor(self.prompt(problem)) for problem in problems]
        padding = {"batch_first": True, "padding_side": "left"}
        inputs = torch.nn.utils.rnn.pad_sequence(prompts, padding_value=self.tokenizer.pad_token_id, **padding)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], **padding)
        drawing = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
        outputs = self.model.generate(inputs, attention_mask=mask, max_new_tokens=48, **drawing)
        texts = self.tokenizer.batch_decode(outputs[:, inputs.shape[1] :], skip_special_tokens=True)
        right = [f"\\boxed{{{problem.answer}}}" in text for text, problem in zip(texts, problems, strict=True)]
        return sum(right) / len(right)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
