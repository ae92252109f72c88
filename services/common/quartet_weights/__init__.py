"""What trainer and rollout share that needs torch: process groups and buckets of weights, and routed experts."""
