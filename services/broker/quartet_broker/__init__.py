"""The experience broker: where every prompt group is, and the one place that decides staleness and backpressure.

It keeps no state of its own: every transition of a group's life is one Lua script in `lua/`, atomic in Redis, so any
number of brokers may serve one Redis. `docs/broker.md` has the table of states.

- `__main__`, `config`, `preflight`, `app`, `metrics`, `errors`: as in every service.
- `servicer`: BrokerService, an RPC a line; each hands on to one of the following.
- `runs`, `prompts`, `experience`, `sessions`, `members`, `evaluations`, `results`, `events`, `dead_letters`, `history`,
  `audit`: the RPCs by subject.
- `spec`, `validation`, `rights`: what a caller may send; the defaults of a run's specification.
- `store`: scripts and reads on Redis, and its failures; `pipeline`: round trips; `servers`, `redis_url`: which server
  has a key; `keys`: names of keys.
- `notifier`: waiting without polling; `wait_queue`: calls that wait for prompts, woken in FIFO order.
- `experience_codec`: a put and a batch as bytes; `streams`: limits of open streams; `traces`: spans.
- `sweeper`: what time does: expiry, health, gauges.

The payload of a group is opaque bytes here: no torch, no numpy.
"""

__version__ = "0.1.0"
