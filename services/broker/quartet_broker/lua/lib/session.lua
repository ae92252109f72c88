-- Guards and helpers of the trainer's session.

-- nil if the session is the run's newest and, unless `settling`, its checkpoint is settled; else the refusal to return.
local function refuse(session, settling)
  even_when_full()
  if not run_state() then return { 'NOT_FOUND' } end
  local newest, committed, settle_to, owner = unpack(
    call('HMGET', RUN, 'session', 'committed_step', 'settle_to', 'trained_by'))
  if is_foreign(owner) then return denied("the run's session", owner) end
  if newest ~= session or newest == '0' then -- 0: none was opened yet
    -- A session that is newer than the newest: Redis was restored from a state before it. The trainer that has the one
    -- known here was replaced then, so from now on that one is fenced too.
    if newest ~= '0' and tonumber(newest) < tonumber(session) and tonumber(session) <= now() then
      call('HSET', RUN, 'session', string.format('%d', session + 1))
    end
    return { 'FENCED', newest }
  end
  if not settling and tonumber(committed) < tonumber(settle_to or 0) then return { 'UNSETTLED', committed, settle_to } end
end

-- Steps below `step` + 1 are committed, `ids` being the batch of `step`. The field `ledger` is "STEPS DIGEST": what
-- OpenSessionResponse.ledger_digest is made of, as long as every step came by here.
local function advance(step, ids)
  if tonumber(step) ~= number('committed_step') then return end
  call('HSET', RUN, 'committed_step', step + 1)
  local steps, before = string.match(call('HGET', RUN, 'ledger') or '', '^(%d+) (%x*)$')
  if steps ~= string.format('%d', step) then return end
  local digest = redis.sha1hex(before .. (#ids > 0 and '\n' or '') .. table.concat(ids, '\n'))
  call('HSET', RUN, 'ledger', string.format('%d %s', step + 1, digest))
end

-- The first step that has no batch yet.
local function next_step()
  local first = number('policy_version')
  for _, step in ipairs(call('HKEYS', BATCHES)) do first = math.max(first, tonumber(step) + 1) end
  return first
end

-- LEASED_TO_TRAINER <-> TRAINED, a whole batch.
local function move_batch(step, from, to)
  call('HSET', BATCHES, step, to == 'TRAINED' and 'TRAINED' or 'GRANTED')
  shift('TRAIN', from, to, tonumber(call('HGET', BATCH_BYTES, step)), call('LLEN', batch(step)))
end

-- The state of a group in a batch.
local function state_in(step) return call('HGET', BATCHES, step) == 'TRAINED' and 'TRAINED' or 'LEASED_TO_TRAINER' end

-- Takes a group out of its step's batch, which is then SHORT, unless it was trained as it was.
local function take_out(id, step)
  call('LREM', batch(step), 0, id)
  call('HINCRBY', BATCH_BYTES, step, -call('HGET', instance(id), 'bytes'))
  if call('HGET', BATCHES, step) ~= 'TRAINED' then call('HSET', BATCHES, step, 'SHORT') end
end

-- What a checkpoint says was trained (by `step`, nil: not known) is COMMITTED, wherever a Redis of an earlier state has
-- it. Returns whether it was elsewhere.
local function consume(id, step, at)
  local state, stream, ticket, lease, batched = unpack(
    call('HMGET', instance(id), 'state', 'stream', 'ticket', 'lease', 'step'))
  if state then
    if ticket and (state == 'QUEUED' or state == 'LEASED' or state == 'READY') then tear(stream, { ticket }) end
    if lease then call('ZREM', LEASES, lease) end
    if state == 'DEAD' then call('ZREM', DEAD, id) end
    local from
    if batched then
      from = state_in(batched)
      take_out(id, batched)
    end
    if step then call('HSET', instance(id), 'step', step) end
    settle({ id }, 'COMMITTED', at, from)
    count('committed', 1)
    return true
  end
  local line = call('HGET', SETTLED, id)
  if not line then
    -- Even its submission was forgotten: no content is known, any will do as the same, nor is its data pass.
    call('HSET', SETTLED, id, 'COMMITTED||1|' .. (step or -1) .. '|')
    call('RPUSH', SETTLED_ORDER, id)
    forget()
    count('committed', 1)
    return true
  end
  local final, rest = string.match(line, '^(%u+)(|.*)$')
  if final == 'COMMITTED' or not step then return false end
  -- Dropped, in a history that was given up since.
  call('HSET', SETTLED, id, 'COMMITTED' .. string.gsub(rest, '|%-?%d+(|%d*)$', '|' .. step .. '%1'))
  count(string.lower(final), -1)
  count('committed', 1)
  return true
end

-- LEASED_TO_TRAINER or TRAINED -> QUEUED, what is left of a batch that is not the one its step was trained with: a Redis
-- of an earlier state made it.
local function dissolve(step)
  local state = call('HGET', BATCHES, step)
  if not state then return end
  if state == 'TRAINED' then move_batch(step, 'TRAINED', 'LEASED_TO_TRAINER') end
  for _, id in ipairs(call('LRANGE', batch(step), 0, -1)) do
    requeue(id, 0, 'Redis was restored from an earlier state: step ' .. step .. ' was trained without it')
  end
  call('UNLINK', batch(step))
  call('HDEL', BATCHES, step)
  call('HDEL', BATCH_BYTES, step)
end
