"""A package that programs in the sandbox may import, for test_sandbox.py."""

ANSWER = 42
