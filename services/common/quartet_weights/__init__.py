"""Code shared by trainer and rollout that needs torch: process groups, buckets of weights, routed experts."""
