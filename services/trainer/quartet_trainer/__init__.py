"""The trainer: leases batches of experience, takes optimizer steps with ColossalAI, sends new weights to the rollouts.

`loop` is what a training does; read it first. `training_run` puts the parts together, in the training thread.

Threads of rank 0: the event loop with the gRPC server; one thread for the training, with all of torch and blocking
calls; two that watch members and keep the membership; one that reports events.
"""

__version__ = "0.1.0"
