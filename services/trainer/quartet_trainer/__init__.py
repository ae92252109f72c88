"""The trainer: leases batches of experience, takes optimizer steps with ColossalAI, sends new weights to the rollouts.

From the outside in:

- `__main__`, `preflight`, `service`: the command, the checks before a start, the server. `launch`: more ranks than one.
- `servicer`: TrainerService, for those who ask. `status`: what they may know. `control`: what they may ask for.
- `life`: puts the parts together, in the training thread. `loop`: what a training does; read it first. It uses:
    - `session`: batches from the broker, steps and checkpoints back to it. `members`: who is in the run.
    - `learner`, `algorithms`, `losses`, `batches`: the model and how it learns. `distribute`: the same on all ranks.
    - `publisher`: weights to the rollouts.
    - `evaluation`, `checkpointing` (folders on disk: `checkpoints`), `records`: what a run leaves behind.

Threads of rank 0: the event loop with the gRPC server; one thread for the training, with all of torch and blocking
calls; two that watch members and keep the membership; one that reports events.
"""

__version__ = "0.1.0"
