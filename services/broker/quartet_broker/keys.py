"""Names of Redis keys. All keys of a run share the hash tag {run_id}; the Lua scripts derive theirs from `run`."""

RUNS = "q:runs"
"""Sorted set of run ids by time of creation, in milliseconds. The only key outside a run's hash tag."""

KEYS = "q:*"
"""Pattern of all keys."""

CHANNELS = "q:*:bell"
"""Pattern of the channels on which scripts announce changes."""


def prefix(run_id: str) -> str:
    """Return what every key of a run begins with."""
    return f"q:{{{run_id}}}:"


def run(run_id: str) -> str:
    """Return the key of the run's own hash."""
    return prefix(run_id) + "run"


def run_of_channel(channel: str) -> str:
    """Return the run id in the name of a channel."""
    return channel.removeprefix("q:{").removesuffix("}:bell")
