"""What trainer and rollout share that needs torch: process groups for weights, and float32 linear layers on a CPU."""
