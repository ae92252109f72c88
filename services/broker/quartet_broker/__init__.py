"""The experience broker: where every prompt group is, and the one place that decides staleness and backpressure.

It keeps no state of its own: every transition of a group's life is one Lua script in `lua/`, atomic in Redis, so any
number of brokers may serve one Redis. `docs/broker.md` has the table of states.

The payload of a group is opaque bytes here: no torch, no numpy.
"""

__version__ = "0.1.0"
