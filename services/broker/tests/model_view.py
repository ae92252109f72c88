"""What stands in Redis about a run, read in one round trip and put into the words of `model_reference`.

The one place of the model test that knows the layout of the keys.
"""

import json

from model_books import SETTLED

from quartet_broker import keys

# All keys of some runs with their contents, as JSON: one round trip costs less than the many small ones of the RPCs.
_LOOK = """
local found = {}
for _, prefix in ipairs(ARGV) do
  for _, key in ipairs(redis.call('KEYS', prefix .. '*')) do
    local kind = redis.call('TYPE', key).ok
    local rest, value = string.sub(key, #prefix + 1), {}
    if string.sub(rest, 1, 2) == 'i:' then
      value = redis.call('HMGET', key, 'state', 'attempt', 'step', 'lease', 'stored')
    elseif rest == 'run' then
      value = redis.call('HMGET', key, 'state', 'policy_version', 'committed_step', 'prompts_ended', 'group_epoch',
        'session', 'settle_to', 'ledger')
    elseif kind == 'hash' and not string.match(rest, '^member:') then
      value = redis.call('HGETALL', key)
    elseif kind == 'zset' then
      value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    elseif kind == 'list' and rest ~= 'settled:order' then
      value = redis.call('LRANGE', key, 0, -1)
    elseif kind == 'stream' and rest ~= 'events' then
      for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
        table.insert(value, entry[2][2])
      end
    end
    table.insert(found, { prefix, rest, value })
  end
end
return cjson.encode(found)
"""


def look(redis, run_ids: list[str]) -> list[dict[str, object]]:
    """Return the picture of each run. `redis` is a synchronous client."""
    prefixes = [keys.prefix(run_id) for run_id in run_ids]
    found: dict[str, dict[str, list]] = {prefix: {} for prefix in prefixes}
    for prefix, rest, value in json.loads(redis.eval(_LOOK, 0, *prefixes)):
        found[prefix][rest] = value or []
    return [_picture(found[prefix]) for prefix in prefixes]


def _ready(found: dict[str, list]) -> list[tuple[str, int]]:
    """Return name and version of the ready groups, by version, those of a version as they came."""
    streams = {int(version): names for version, names in _under(found, "ready:").items()}
    assert sorted(streams) == sorted(_scores(found.get("ready", [])).values()), "each version that has groups is listed"
    assert all(streams.values()), "a version without groups has no stream"
    return [(name, version) for version in sorted(streams) for name in streams[version]]


def _pairs(flat: list) -> dict:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list) -> dict[str, int]:
    return {name: int(float(score)) for name, score in _pairs(flat).items()}


def _under(found: dict[str, list], start: str) -> dict[str, list]:
    return {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}


def _picture(found: dict[str, list]) -> dict[str, object]:
    state, version, committed, ended, group_epoch, session, settle_to, ledger = found["run"]
    batch_states = {int(step): state for step, state in _pairs(found.get("batches", [])).items()}
    states, held, contents = _instances(found, batch_states)
    stats = {name: int(value) for name, value in _pairs(found.get("stats", [])).items()}
    streams = {f"prompts:{name}": value for name, value in _under(found, "prompts:").items()}
    leases = _scores(found.get("leases", []))
    assert sorted(held) == sorted(leases), "each lease of an instance has a time, and each time an instance"
    assert sorted(contents) == sorted(_under(found, "payload:")), "stored groups have content, nothing else"
    assert set(_under(found, "transcript:")) <= set(contents), "transcripts of groups that are not there"
    dead = _scores(found.get("dead", []))
    return {
        "states": states,
        "stats": stats | {"dead": len(dead)},
        "run": (state, int(version), int(committed), ended == "1", int(group_epoch), int(session)),
        "settling": (int(settle_to or 0), ledger or None),
        "waiting": {
            stream: waiting
            for stream, names in streams.items()
            if (waiting := [name for name in names if states[name][0] == "QUEUED"])
        },
        "tickets": {stream: sorted(names) for stream, names in streams.items() if names},
        "leases": leases,
        "ready": _ready(found),
        "batches": {step: (state, found.get(f"batch:{step}", [])) for step, state in batch_states.items()},
        "open bytes": stats.get("open_bytes", 0),
        "batch bytes": {int(step): int(size) for step, size in _pairs(found.get("batches:bytes", [])).items()},
        "dead": dead,
        "members": _scores(found.get("members", [])),
    }


def _instances(found: dict[str, list], batch_states: dict[int, str]) -> tuple[dict, list[str], list[str]]:
    """Return (state, deliveries, step) of each instance, settled or not; leases held; names of contents."""
    states, held, contents = {}, [], []
    for name, (state, attempt, step, lease, content) in _under(found, "i:").items():
        step = -1 if step in (None, False) else int(step)
        if state == "LEASED_TO_TRAINER" and batch_states.get(step) == "TRAINED":
            state = "TRAINED"
        states[name] = state, int(attempt), step
        held += [lease] if state == "LEASED" else []
        contents += [content] if content else []
    for name, line in _pairs(found.get("settled", [])).items():
        assert name not in states, f"{name} is settled and yet alive"
        state, _, attempt, step = line.split("|")[:4]
        assert state in SETTLED
        states[name] = state, int(attempt), int(step)
    return states, held, contents
