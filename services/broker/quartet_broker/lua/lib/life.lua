-- Transitions of a prompt group that several scripts share.
--
-- An instance is the hash q:{run}:i:ID. While it waits, the stream in its field `stream` has a ticket: a stream entry
-- that names the instance. A group in a step's batch stays LEASED_TO_TRAINER in its hash; whether the step was trained
-- is recorded once, in q:{run}:batches. A terminal instance is settled: its hash is deleted, and the hash
-- q:{run}:settled gets a line.
--
-- What is stored of an instance that is QUEUED, LEASED or DEAD are completions that no verifier could score.

local GAUGES = {
  QUEUED = 'queued', LEASED = 'leased', READY = 'ready', LEASED_TO_TRAINER = 'leased_to_trainer', TRAINED = 'trained',
  DEAD = 'dead_training',
}
local OUTSIDE = { QUEUED = 1, LEASED = 1 } -- evaluation and serving prompts under way
local OPEN = { READY = 1, LEASED_TO_TRAINER = 1 } -- groups that count toward max_experience_bytes
local REASONS_KEPT = 20
local UNSCORED = { QUEUED = 1, LEASED = 1, DEAD = 1 } -- what is stored of these

-- Moves counts, and the bytes of stored groups, from one state to another (nil: not a counted state).
local function shift(purpose, from, to, bytes, groups)
  groups = groups or 1
  if purpose == 'TRAIN' then
    if GAUGES[from] then count(GAUGES[from], -groups) end
    if GAUGES[to] then count(GAUGES[to], groups) end
    if bytes then count('open_bytes', bytes * ((OPEN[to] or 0) - (OPEN[from] or 0))) end
  else
    count('untrained_in_flight', (OUTSIDE[to] or 0) - (OUTSIDE[from] or 0))
  end
end

-- Counts the training instances of a data pass that may still be trained. `by`: 1 or -1.
local function live(pass, by)
  if pass then tally(PASSES, pass, by) end
end

-- What a prompt takes in Redis, by the bytes of its text; it counts toward max_prompt_bytes until it is settled.
local function size_of(bytes) return bytes + 1024 end

-- The bytes of prompts kept now, if `bytes` more would exceed `times` times the run's limit; else false or nil.
local function prompts_overflow(bytes, times)
  local most, kept = number('max_prompt_bytes'), gauge('prompt_bytes')
  return most and kept + bytes > most * times and kept -- runs of older brokers have no limit
end

-- The caller, if its prompts are limited to its share; '' for the run's creator and its trainer, which have no limit.
local function guest_of_the_run()
  local made_by, trained_by = unpack(call('HMGET', RUN, 'made_by', 'trained_by'))
  return is_foreign(made_by) and trained_by ~= CALLER and CALLER or ''
end

-- Puts a ticket for the instance at the end of a prompt stream.
local function enqueue(id, stream)
  if call('EXISTS', P .. stream) == 0 then call('XGROUP', 'CREATE', P .. stream, 'rollouts', '0', 'MKSTREAM') end
  local ticket = call('XADD', P .. stream, '*', 'i', id)
  call('HSET', instance(id), 'state', 'QUEUED', 'stream', stream, 'ticket', ticket)
end

-- Removes tickets from their stream, delivered or not.
local function remove_tickets(stream, tickets)
  if #tickets == 0 then return end
  if not is_ready(stream) then call('XACK', P .. stream, 'rollouts', unpack(tickets)) end
  call_many('XDEL', P .. stream, tickets) -- a batch may have more than Lua's stack
  -- The stream of a version is not used again once the version has passed.
  local of_version = is_ready(stream) or string.sub(stream, 1, 12) == 'prompts:pin:'
  if of_version and call('XLEN', P .. stream) == 0 then
    call('UNLINK', P .. stream)
    if is_ready(stream) then call('ZREM', READY, string.sub(stream, 7)) end
  end
end

-- The stream in which a requeued prompt waits.
local function queue_of(purpose, pinned, stored)
  if purpose == 'TRAIN' then return 'prompts:again' end
  -- If completions are stored, nothing is generated: rollouts with weights of any version can score them.
  return pinned and not stored and 'prompts:pin:' .. pinned or 'prompts:serve'
end

-- Attaches the completions stored under `name` to the instance and deletes those it had. `name` nil: deletes only.
local function keep_unscored(id, name, bytes)
  local before, bytes_before = unpack(call('HMGET', instance(id), 'stored', 'bytes'))
  if before then call('UNLINK', payload(before)) end
  local more = bytes - tonumber(bytes_before or 0)
  if name then
    call('HSET', instance(id), 'stored', name, 'bytes', bytes)
  else
    call('HDEL', instance(id), 'stored', 'bytes')
  end
  count('unscored_bytes', more)
  count('experience_bytes', more)
end
local function drop_unscored(id) keep_unscored(id, nil, 0) end

-- LEASED, or a stored group -> QUEUED, before prompts that were never delivered. Completions that wait for a score are
-- kept. `why`: for the instance's history.
local function requeue(id, attempt, why)
  local h = call('HMGET', instance(id), 'purpose', 'state', 'stream', 'ticket', 'lease', 'bytes', 'pinned', 'stored',
    'life')
  local purpose, state, stream, ticket, lease, bytes = h[1], h[2], h[3], h[4], h[5], tonumber(h[6] or 0)
  local unscored = UNSCORED[state]
  enqueue(id, queue_of(purpose, h[7], unscored and h[8]))
  remove_tickets(stream, { ticket })
  if lease then call('ZREM', LEASES, lease) end
  if h[8] and not unscored then
    call('UNLINK', payload(h[8]), transcript(h[8]))
    call('HDEL', instance(id), 'stored', 'bytes')
    count('experience_bytes', -bytes)
  end
  call('HDEL', instance(id), 'lease', 'holder', 'shown', 'finished', 'version', 'step', 'taken')
  call('HSET', instance(id), 'attempt', attempt, 'life', lived(h[9], moment('R', now(), in_words(why))))
  shift(purpose, state, 'QUEUED', bytes)
  notify('prompts')
end

-- Reasons that differ only in numbers (lengths, lines, attempts) count as the same.
local function kind_of(reason) return (string.gsub(reason, '%d+', '0')) end

-- Counts the training prompts that died in a row of the same reason before any group was stored.
local function died(reason)
  if gauge('put') > 0 then return end
  if kind_of(call('HGET', RUN, 'first_dead_reason') or '') ~= kind_of(reason) then call('HSET', RUN, 'first_dead', 0) end
  call('HSET', RUN, 'first_dead_reason', reason)
  call('HINCRBY', RUN, 'first_dead', 1)
end

-- The reason to end the run as failed: its first prompts all died of the same reason. '': there is none.
local function hopeless()
  local state, most, dead, reason = unpack(call('HMGET', RUN, 'state', 'max_first_dead', 'first_dead', 'first_dead_reason'))
  most, dead = tonumber(most or 0), tonumber(dead or 0)
  if state ~= 'ACTIVE' or most == 0 or dead < most or gauge('put') > 0 then return '' end
  return 'the first ' .. dead .. ' prompts died of one reason, and no group was made: ' .. reason
end

-- The key of an evaluation's hash ("prompts", "dead", "bytes" of its headers); false or nil if it was deleted.
local function evaluation_of(id)
  local key = id and P .. 'evaluation:' .. id
  return key and call('EXISTS', key) == 1 and key
end

-- LEASED -> DEAD: kept, with its reasons, until it is requeued.
local function set_dead(id, at)
  local h = call('HMGET', instance(id), 'purpose', 'stream', 'ticket', 'lease', 'evaluation', 'reasons', 'pass',
    'life')
  local last = h[6] and call('HGET', instance(id), 'reason:' .. h[6]) or 'no reason was given'
  call('ZADD', DEAD, at, id)
  call('HSET', instance(id), 'state', 'DEAD', 'life', lived(h[8], moment('X', at, in_words(last))))
  remove_tickets(h[2], { h[3] })
  call('ZREM', LEASES, h[4])
  call('HDEL', instance(id), 'lease', 'holder', 'ticket')
  shift(h[1], 'LEASED', 'DEAD')
  live(h[7], -1)
  if h[1] == 'TRAIN' then died(last) end
  emit('notice', 'prompt ' .. id .. ' was set aside as dead: ' .. last, 'level', 'warning')
  local evaluation = evaluation_of(h[5])
  if evaluation then
    call('HINCRBY', evaluation, 'dead', 1)
    notify('evaluations')
  end
  -- One group fewer is in progress: another prompt may be admitted, or the data may have ended.
  notify('prompts')
  notify('experience')
  notify_results({ id })
end

-- A delivery failed: the prompt is requeued, or dead after its last delivery (at once if `permanent`).
-- Returns true when it is dead.
local function fail(id, reason, permanent, at)
  local attempt = tonumber(call('HGET', instance(id), 'attempt'))
  local n = call('HINCRBY', instance(id), 'reasons', 1)
  call('HSET', instance(id), 'reason:' .. n, reason)
  if n > REASONS_KEPT then call('HDEL', instance(id), 'reason:' .. n - REASONS_KEPT) end
  if permanent or attempt >= number('max_deliveries') then
    set_dead(id, at)
    return true
  end
  requeue(id, attempt, reason)
  return false
end

-- The id of a lease's instance, if the caller holds it and it has not expired. A lease id is "NONCE-N:INSTANCE".
local function leased(lease, at)
  local id = string.match(lease, '^[^:]*:(.*)$')
  if not id then return nil end
  local held, owner = unpack(call('HMGET', instance(id), 'lease', 'owner'))
  if held ~= lease or is_foreign(owner) then return nil end
  local expiry = call('ZSCORE', LEASES, lease)
  return expiry and tonumber(expiry) > at and id
end

-- Ends expired leases, at most `limit` of them.
local function expire_leases(at, limit)
  local expired = call('ZRANGEBYSCORE', LEASES, '-inf', at, 'LIMIT', 0, limit)
  for _, lease in ipairs(expired) do
    local id = string.match(lease, '^[^:]*:(.*)$')
    local holder = call('HGET', instance(id), 'holder')
    fail(id, 'the lease of ' .. holder .. ' expired', false, at)
  end
  return #expired
end

-- Whether an instance that a caller submitted before ('': it names none) is unknown: Redis was restored from an earlier
-- state, so other submissions may be missing too.
local function is_forgotten(id)
  return id ~= '' and call('EXISTS', instance(id)) == 0 and call('HEXISTS', SETTLED, id) == 0
end

-- Whether no training prompt is queued or leased, and none will come.
local function prompts_are_over()
  return call('HGET', RUN, 'prompts_ended') == '1' and gauge('queued') == 0 and gauge('leased') == 0
end
