"""Measures a model folder with plain transformers on all held-out problems. Runs in the trainer's environment.

Prints one JSON object: the number of problems, accuracy when sampled at temperature 1, greedy accuracy.
"""

import json
import sys
from pathlib import Path

import torch
from task import split
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_up import sampled_accuracy


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


if __name__ == "__main__":
    sys.exit(main())
