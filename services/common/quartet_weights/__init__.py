"""What trainer and rollout share of the weights' way, on torch. `quartet_common` is for services without torch."""
