"""The TRL peer of benchmarks/trl_grpo.py, in an environment of its own: `trl_side.py MODEL TRAIN.jsonl OPTIONS`.

`OPTIONS` is JSON: {"steps", "prompts", "completions", "micro_batch", "new_tokens", "learning_rate", "threads", "lora"}.
Prints one line of JSON at the end: the time of each step's end, in seconds since 1970, and the trainer's log.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OPENING, CLOSING = "<answer>", "</answer>"
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # as ours by default


def rewards(completions: list[str], gt_answer: list[str], **_) -> list[float]:
    """1 for the right answer between the tags, else 0: what `think_answer_tags` with boxes or without gives."""
    return [float(read_answer(text) == answer) for text, answer in zip(completions, gt_answer, strict=True)]


def read_answer(text: str) -> str:
    """Return what stands between the answer tags, without a box."""
    inside = text.partition(OPENING)[2].partition(CLOSING)[0]
    return inside.removeprefix("\\boxed{").removesuffix("}")


class Clock(TrainerCallback):
    """Notes when each optimizer step is over."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args, state, control, **_) -> None:
        self.ends.append(time.time())
        self.cpu.append(time.process_time())


def main() -> None:
    model_folder, data, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(options["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with open(data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "gt_answer": row["gt_answer"]} for row in rows])
    batch = options["prompts"] * options["completions"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=options["micro_batch"],
            gradient_accumulation_steps=batch // options["micro_batch"],
            num_generations=options["completions"],
            max_completion_length=options["new_tokens"],
            temperature=1.0,
            loss_type="dapo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=options["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.99,
            max_grad_norm=1.0,
            max_steps=options["steps"],
            gradient_checkpointing=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=42,
        )
        clock = Clock()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[clock],
            peft_config=LoraConfig(r=options["lora"], target_modules=ADAPTED) if options["lora"] else None,
        )
        trainer.train()
        logged = [row for row in trainer.state.log_history if "reward" in row]
    result = {
        "ends": clock.ends,
        "cpu": clock.cpu,
        "reward": [row["reward"] for row in logged],
        "length": [row["completions/mean_length"] for row in logged],
        "zero_variance": [row["frac_reward_zero_std"] for row in logged],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
