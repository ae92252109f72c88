"""The trainer: leases batches of experience, takes optimizer steps with ColossalAI, sends new weights to the rollouts.

`loop` is the training loop; read it first. `training_run` assembles its parts, in the training thread.

Threads of rank 0: the event loop with the gRPC server; the training thread, with torch and blocking calls; threads
that watch the members, send heartbeats, report events, observe the rollouts, fetch batches, send weights and write
checkpoints.
"""
