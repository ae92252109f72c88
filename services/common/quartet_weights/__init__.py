"""What trainer and rollout share that needs torch: process groups of weights, and routed experts."""
