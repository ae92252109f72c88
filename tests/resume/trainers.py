"""Lives of the real trainer, each a process of its own, forked from one that has imported everything already.

Importing torch and ColossalAI takes far longer than the steps of a small model; a trainer that is killed twenty times
would spend its time there. Nothing but modules is shared: no model, no thread, no connection.

    .quartet/envs/trainer/bin/python trainers.py MODEL_FOLDER

makes a small model in MODEL_FOLDER and prints "ready". Each line of standard input is the arguments of a trainer, as
JSON; its pid is printed, and its exit status when it has ended.
"""

import json
import os
import sys
import threading
from pathlib import Path

LAYERS, HIDDEN = 2, 32


def make_model(folder: Path) -> None:
    """Write a Qwen2 of 128 tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, safe_serialization=True)


def tell(**event: object) -> None:
    """Print an event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def live(arguments: list[str]) -> None:
    """Be a trainer until it ends."""
    from quartet_trainer.__main__ import main

    os.setpgid(0, 0)
    log = os.open(os.environ["TRAINER_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["quartet-trainer", *arguments]
    os._exit(main())


def main() -> None:
    """Fork trainers until standard input ends."""
    # One thread: a process that has others cannot be forked safely.
    make = os.fork()
    if make == 0:
        make_model(Path(sys.argv[1]))
        os._exit(0)
    os.waitpid(make, 0)

    from quartet_trainer.learner import colossalai_cures

    colossalai_cures.apply()
    import quartet_trainer.__main__
    import quartet_trainer.learner.booster_learner
    import quartet_trainer.life  # noqa: F401

    assert threading.active_count() == 1, [thread.name for thread in threading.enumerate()]
    tell(event="ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
        tell(event="started", pid=child)
        _, status = os.waitpid(child, 0)
        tell(event="ended", status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
