"""Fixtures of several files."""

from sandbox_modes import any_sandbox, sandbox  # noqa: F401
