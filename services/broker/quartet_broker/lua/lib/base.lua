-- Precedes every script: keys, clock, counters, notifications, events.
--
-- KEYS[1] is "q:{run}:run". All keys of a run share its hash tag, so a Redis Cluster has them on one server, and a
-- script may access them although only KEYS[1] is declared.
local call = redis.call
-- The name of the caller's certificate; '' is unrestricted: an operator, the broker, every caller without certificates.
local CALLER = table.remove(ARGV, 1)
local RUN = KEYS[1]
local P = string.sub(RUN, 1, -4)
local STATS, LEASES, READY, DEAD, MEMBERS = P .. 'stats', P .. 'leases', P .. 'ready', P .. 'dead', P .. 'members'
local BATCHES, BATCH_BYTES = P .. 'batches', P .. 'batches:bytes'
local SETTLED, SETTLED_ORDER, PASSES = P .. 'settled', P .. 'settled:order', P .. 'passes'
-- While a Cluster moves a slot, some of its keys are on the other server, and a script fails at the first of them. This
-- key does not exist on either: accessing it first fails the script before it has changed anything.
call('EXISTS', P .. 'nothing')
local CALLERS = P .. 'callers' -- what each caller holds of the run: "members:NAME", "prompts:NAME", "bytes:NAME"
local EVENTS_KEPT, EVENT_BYTES_KEPT = 10000, 67108864 -- the bytes of a run that was made without `max_event_bytes`
-- The version of a run's keys, their types and contents. Raise it with every change that is incompatible with earlier
-- brokers or with existing runs. Runs of '1', the layout of v1.0, have no such field.
local LAYOUT = '2'
-- Maximum arguments of one command, limited by Lua's stack. Even, so that field and value stay together.
local MOST_ARGUMENTS = 4000

local function instance(id) return P .. 'i:' .. id end
local function batch(step) return P .. 'batch:' .. step end
-- The stream of the ready groups of a version, without P; READY, a sorted set, lists the versions that have one.
local function ready(version) return 'ready:' .. version end
local function is_ready(stream) return string.sub(stream, 1, 6) == 'ready:' end
-- A group's bytes, by the name under which they are stored. Their values never pass through Lua.
local function payload(name) return P .. 'payload:' .. name end
local function transcript(name) return P .. 'transcript:' .. name end

-- Milliseconds by Redis' clock, which decides every expiry.
local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Counts are written, and changes published, once, by `finish` when the script ends.
local tallies = { [STATS] = {}, [PASSES] = {}, [CALLERS] = {} }
local topics, with_result = {}, {} -- what is published: topics; ids of instances that have a result
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

-- Wakes the waiters for `topic` in every broker process when the script ends.
local function notify(topic) topics[topic] = true end
local function notify_results(ids)
  for _, id in ipairs(ids) do table.insert(with_result, id) end
end

local function bytes_of(fields)
  local bytes = 0
  for _, part in ipairs(fields) do bytes = bytes + #part end
  return bytes
end

-- Adds an event; deletes the oldest ones while there are too many, or too many bytes of them.
local function emit(...)
  local events, most = P .. 'events', number('max_event_bytes') or EVENT_BYTES_KEPT
  local id = call('XADD', events, '*', ...)
  count('event_bytes', bytes_of({ ... }))
  while call('XLEN', events) > EVENTS_KEPT or gauge('event_bytes') > most do
    local oldest = call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
    call('XDEL', events, oldest[1])
    count('event_bytes', -math.min(bytes_of(oldest[2]), gauge('event_bytes'))) -- older brokers did not count them
  end
  notify('events')
  return id
end

-- At its memory limit Redis rejects a script whose first write could grow the data, but no later write. Scripts that
-- free memory (the trainer's calls, expiry) or write a few bytes (heartbeats) begin with this write, which cannot grow.
local function even_when_full() call('PERSIST', RUN) end

-- The run's state; false if it does not exist or is being deleted. Raises if its keys have another layout, which scripts
-- must not access; store.py recognizes the error by the word LAYOUT.
local function run_state()
  local state, layout = unpack(call('HMGET', RUN, 'state', 'layout'))
  if not state or state == 'DELETING' then return false end
  if layout ~= LAYOUT then error('LAYOUT ' .. (layout or '1') .. ' of ' .. LAYOUT) end
  return state
end

-- Whether something belongs to another caller. `owner`: the name of its certificate; false or '': no owner.
local function is_foreign(owner) return CALLER ~= '' and owner and owner ~= '' and owner ~= CALLER end
local function denied(what, owner) return { 'DENIED', what, owner } end

-- Counts what the holder of a certificate has in the run. `owner`: its name; false or '': no owner.
local function hold(kind, owner, by)
  if owner and owner ~= '' then tally(CALLERS, kind .. ':' .. owner, by) end
end

-- The refusal of `more` of a kind if the caller would exceed its share of `most`; nil if it would not.
local function over_share(kind, more, most)
  local share = number('caller_share') -- nil in runs of older brokers
  if CALLER == '' or not share or not most then return end
  local held, most_held = tonumber(call('HGET', CALLERS, kind .. ':' .. CALLER) or 0), math.floor(share * most)
  if held + more > most_held then return { 'OVER_SHARE', kind, held, most_held } end
end

-- Writes the script's counts and publishes its notifications. store.py passes the script's reply through it.
local function finish(reply)
  for hash, names in pairs(tallies) do
    for name, by in pairs(names) do
      if by ~= 0 then call('HINCRBY', hash, name, by) end
    end
  end
  local message = {}
  for topic in pairs(topics) do table.insert(message, topic) end
  if #with_result > 0 then table.insert(message, 'result ' .. cjson.encode(with_result)) end
  if #message > 0 then call('PUBLISH', P .. 'bell', table.concat(message, '\n')) end
  return reply
end
