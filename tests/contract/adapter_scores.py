"""Log-probs under a base model with an adapter, by PEFT alone; run with the trainer's environment.

    python adapter_scores.py BASE      orders come as lines of JSON

order                                   answer
{"adapter", "prompt", "completion"}     {"log_probs"}: of the completion's tokens; "adapter" is a folder, "": the base
"""

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answer orders until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
        if order["adapter"]:
            model = PeftModel.from_pretrained(model, order["adapter"])
        prompt, completion = order["prompt"], order["completion"]
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([prompt + completion])).logits[0]
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = log_probs.gather(1, torch.tensor(completion)[:, None])[:, 0]
        print(json.dumps({"log_probs": chosen.tolist()}), flush=True)


if __name__ == "__main__":
    main()
