"""Measures a model folder with plain transformers on all held-out problems. Runs in the trainer's environment.

Prints one JSON object: the number of problems, accuracy when sampled at temperature 1, greedy accuracy.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from task import answer, split
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast


def main() -> int:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = split()[1]
    report = {
        "problems": len(held_out),
        "sampled_accuracy": sampled_accuracy(model, tokenizer, held_out, temperature=1),
        "greedy_accuracy": sampled_accuracy(model, tokenizer, held_out, temperature=0),
    }
    print(json.dumps(report))
    return 0


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], temperature: float
) -> float:
    """Return the share of problems answered correctly; temperature 0 is greedy."""
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


if __name__ == "__main__":
    sys.exit(main())
