"""What trainer and rollout share that needs torch: process groups of weights, routed experts, float32 linear layers."""
