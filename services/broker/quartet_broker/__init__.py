"""The experience broker tracks every prompt group and enforces staleness and backpressure.

It keeps no state of its own: every transition of a group's life is one Lua script in `lua/`, atomic in Redis, so any
number of brokers may serve one Redis. `docs/broker.md` has the table of states.

A group's payload is opaque bytes here, so that neither torch nor numpy is needed.
"""
