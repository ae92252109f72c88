-- Put before every script: keys, clock, counters, bell, events.
--
-- KEYS[1] is "q:{run}:run". All keys of a run share its hash tag, so in a Redis Cluster they stand on one server and a
-- script may reach them although only KEYS[1] is declared.
local call = redis.call
-- The name of the caller's certificate; '' may do all: an operator, the broker itself, everyone without certificates.
local CALLER = table.remove(ARGV, 1)
local RUN = KEYS[1]
local P = string.sub(RUN, 1, -4)
local STATS, LEASES, READY, DEAD, MEMBERS = P .. 'stats', P .. 'leases', P .. 'ready', P .. 'dead', P .. 'members'
local BATCHES, BATCH_BYTES = P .. 'batches', P .. 'batches:bytes'
local SETTLED, SETTLED_ORDER, PASSES = P .. 'settled', P .. 'settled:order', P .. 'passes'
-- In a Cluster, a slot that is being moved to another server has some of its keys there already, and a script may not
-- go on there. This key is never there: asked for first, it ends the script before it has done anything.
call('EXISTS', P .. 'nothing')
local CALLERS = P .. 'callers' -- what each caller holds of the run: "members:NAME", "prompts:NAME", "bytes:NAME"
local EVENTS_KEPT, EVENT_BYTES_KEPT = 10000, 67108864 -- the bytes of a run that was made without `max_event_bytes`
-- Which keys a run has, of which types, with what in them. Raise it with every change that a broker of before, or the
-- runs of before, could not bear. '1', that of v1.0, was not written down.
local LAYOUT = '2'
-- Most arguments of one command: Lua's stack holds some thousands. Even, so that field and value stay together.
local MOST_ARGUMENTS = 4000

local function instance(id) return P .. 'i:' .. id end
local function batch(step) return P .. 'batch:' .. step end
-- The stream of the ready groups of a version, without P; READY, a sorted set, lists the versions that have one.
local function ready(version) return 'ready:' .. version end
local function is_ready(stream) return string.sub(stream, 1, 6) == 'ready:' end
-- What a group is made of, by the name it was stored under; it never passes through a script.
local function payload(name) return P .. 'payload:' .. name end
local function transcript(name) return P .. 'transcript:' .. name end

-- Milliseconds by Redis' clock: the only clock that decides anything.
local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Counts change once, when the script ends, and the bell is rung once: `finish` below, which scripts.py calls.
local tallies = { [STATS] = {}, [PASSES] = {}, [CALLERS] = {} }
local rings, rung_for = {}, {} -- topics; ids of instances that have a result
local function tally(hash, name, by) tallies[hash][name] = (tallies[hash][name] or 0) + by end
local function count(name, by) tally(STATS, name, by) end
local function gauge(name) return tonumber(call('HGET', STATS, name) or 0) + (tallies[STATS][name] or 0) end
local function number(name) return tonumber(call('HGET', RUN, name)) end
-- One command with many arguments, in portions that fit.
local function call_many(command, key, arguments)
  for first = 1, #arguments, MOST_ARGUMENTS do
    call(command, key, unpack(arguments, first, math.min(first + MOST_ARGUMENTS - 1, #arguments)))
  end
end

local function unlink_all(keys)
  for first = 1, #keys, MOST_ARGUMENTS do
    call('UNLINK', unpack(keys, first, math.min(first + MOST_ARGUMENTS - 1, #keys)))
  end
end

-- Wakes those who wait for `topic` in any broker process, when the script ends.
local function ring(topic) rings[topic] = true end
local function ring_results(ids)
  for _, id in ipairs(ids) do table.insert(rung_for, id) end
end

local function bytes_of(fields)
  local bytes = 0
  for _, part in ipairs(fields) do bytes = bytes + #part end
  return bytes
end

-- Adds an event; the oldest go while there are too many, or too many bytes of them.
local function emit(...)
  local events, most = P .. 'events', number('max_event_bytes') or EVENT_BYTES_KEPT
  local id = call('XADD', events, '*', ...)
  count('event_bytes', bytes_of({ ... }))
  while call('XLEN', events) > EVENTS_KEPT or gauge('event_bytes') > most do
    local oldest = call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
    call('XDEL', events, oldest[1])
    count('event_bytes', -math.min(bytes_of(oldest[2]), gauge('event_bytes'))) -- some were not counted by their broker
  end
  ring('events')
  return id
end

-- Redis at its memory limit refuses a script's first write if that could grow the data, but not those after it. What
-- leads to less data (the trainer's way, expiry) or is a few bytes (heartbeats) begins with a write that cannot grow.
local function even_when_full() call('PERSIST', RUN) end

-- State of the run; false when there is none, or no more. Raises if its keys are laid out otherwise than here: a script
-- must not read or write them. store.py knows the error by its first word, wherever Redis puts that.
local function run_state()
  local state, layout = unpack(call('HMGET', RUN, 'state', 'layout'))
  if not state or state == 'DELETING' then return false end
  if layout ~= LAYOUT then error('LAYOUT ' .. (layout or '1') .. ' of ' .. LAYOUT) end
  return state
end

-- What belongs to the holder of a certificate is refused to others. `owner`: its name; false or '': nobody's.
local function is_foreign(owner) return CALLER ~= '' and owner and owner ~= '' and owner ~= CALLER end
local function denied(what, owner) return { 'DENIED', what, owner } end

-- Counts what the holder of a certificate has in the run. `owner`: its name; false or '': nobody's.
local function hold(kind, owner, by)
  if owner and owner ~= '' then tally(CALLERS, kind .. ':' .. owner, by) end
end

-- The refusal of `more` of a kind when the caller would hold more than its share of `most`; nil if it may have them.
local function over_share(kind, more, most)
  local share = number('caller_share') -- a run that an older broker made has none
  if CALLER == '' or not share or not most then return end
  local held, most_held = tonumber(call('HGET', CALLERS, kind .. ':' .. CALLER) or 0), math.floor(share * most)
  if held + more > most_held then return { 'OVER_SHARE', kind, held, most_held } end
end

-- Writes and tells what came together in a script. Returns the script's answer.
local function finish(reply)
  for hash, names in pairs(tallies) do
    for name, by in pairs(names) do
      if by ~= 0 then call('HINCRBY', hash, name, by) end
    end
  end
  local message = {}
  for topic in pairs(rings) do table.insert(message, topic) end
  if #rung_for > 0 then table.insert(message, 'result ' .. cjson.encode(rung_for)) end
  if #message > 0 then call('PUBLISH', P .. 'bell', table.concat(message, '\n')) end
  return reply
end
