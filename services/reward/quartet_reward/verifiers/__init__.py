"""The verifiers. `base` is their interface; a new one is a file here and a line in `registry`.

A verifier outside this package is a Python entry point of the group `quartet.verifiers` (see docs/reward.md).
"""
