"""The verifiers. `base` is their interface; a new one is a class in a module here, named in `VERIFIERS` or `registry`.

A verifier outside this package is a Python entry point of the group `quartet.verifiers` (see docs/reward.md).
"""
