"""The launcher: Redis and the four services of one run on this machine, each from its own environment."""
