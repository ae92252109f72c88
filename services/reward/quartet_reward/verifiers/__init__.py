"""The built-in verifiers. `base` is the interface; each is a class, named in its module's `VERIFIERS` or `registry`.

Other packages offer verifiers by the entry point group `quartet.verifiers` (docs/reward.md).
"""
