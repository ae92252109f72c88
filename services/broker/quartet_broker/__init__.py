"""The experience broker: where every prompt group is, and the one place that decides staleness and backpressure.

It keeps no state of its own: every transition of a group's life is one Lua script in `lua/`, atomic in Redis, so any
number of brokers may serve one Redis. `docs/broker.md` has the table of states.

- `servicer`: BrokerService, an RPC a line; each hands on to one of the following.
- `runs`, `prompts`, `experience`, `sessions`, `members`, `evaluations`, `results`, `events`: the RPCs by subject.
- `spec`, `validation`: what a caller may send; the defaults of a run's specification.
- `store`: Redis and its failures; `trips`: round trips to it; `servers`, `redis_url`: which server has a key;
  `scripts`: the Lua files; `keys`: names of keys.
- `bell`: waiting without polling; `lanes`: those who wait at the gate stand in line.
- `puts`: a put cut out of its bytes; `wire`: a batch's messages as bytes; `audit`: a run's books, proved.
- `sweeper`: what time does: expiry, health, gauges.
- `config`, `__main__`: the [broker] section and the command line.

The payload of a group is opaque bytes here: no torch, no numpy.
"""

__version__ = "0.1.0"
