-- Guards and helpers of the trainer's session.

-- nil if the session is the run's newest and, unless `settling`, its checkpoint is settled; else the refusal to return.
local function refuse(session, settling)
  even_when_full()
  if not run_state() then return { 'NOT_FOUND' } end
  local newest, committed, settle_to, owner = unpack(
    call('HMGET', RUN, 'session', 'committed_step', 'settle_to', 'trained_by'))
  if is_foreign(owner) then return denied("the run's session", owner) end
  if newest ~= session or newest == '0' then -- 0: none was opened yet
    -- The caller's session is newer than the one in Redis, which was restored from an earlier state. The trainer of the
    -- older session was replaced, so that one is fenced too.
    if newest ~= '0' and tonumber(newest) < tonumber(session) and tonumber(session) <= now() then
      call('HSET', RUN, 'session', string.format('%d', session + 1))
    end
    return { 'FENCED', newest }
  end
  if not settling and tonumber(committed) < tonumber(settle_to or 0) then return { 'UNSETTLED', committed, settle_to } end
end

-- Records that `step`, with the batch `ids`, is committed. The field `ledger`, "STEPS DIGEST", gives
-- OpenSessionResponse.ledger_digest; it is valid as long as every step was committed here.
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

-- The state of the groups in a step's batch.
local function state_in(step) return call('HGET', BATCHES, step) == 'TRAINED' and 'TRAINED' or 'LEASED_TO_TRAINER' end

-- Removes a group from its step's batch. The batch is then SHORT, unless it is TRAINED.
local function take_out(id, step)
  call('LREM', batch(step), 0, id)
  call('HINCRBY', BATCH_BYTES, step, -call('HGET', instance(id), 'bytes'))
  if call('HGET', BATCHES, step) ~= 'TRAINED' then call('HSET', BATCHES, step, 'SHORT') end
end

-- Any state -> COMMITTED: the checkpoint says that the instance was trained (in `step`; nil: unknown), but a Redis that
-- was restored from an earlier state may have it in another one. Returns whether it had.
local function settle_trained(id, step, at)
  local state, stream, ticket, lease, batched = unpack(
    call('HMGET', instance(id), 'state', 'stream', 'ticket', 'lease', 'step'))
  if state then
    if ticket and (state == 'QUEUED' or state == 'LEASED' or state == 'READY') then remove_tickets(stream, { ticket }) end
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
    -- Redis lost its submission too. Content and data pass are unknown: any content counts as the same.
    call('HSET', SETTLED, id, 'COMMITTED||1|' .. (step or -1) .. '|')
    call('RPUSH', SETTLED_ORDER, id)
    forget()
    count('committed', 1)
    return true
  end
  local final, rest = string.match(line, '^(%u+)(|.*)$')
  if final == 'COMMITTED' or not step then return false end
  -- Dropped, in a history that the restore replaced.
  call('HSET', SETTLED, id, 'COMMITTED' .. string.gsub(rest, '|%-?%d+(|%d*)$', '|' .. step .. '%1'))
  count(string.lower(final), -1)
  count('committed', 1)
  return true
end

-- LEASED_TO_TRAINER or TRAINED -> QUEUED: the rest of a batch with which its step was not trained. It is of an earlier
-- state from which Redis was restored.
local function requeue_batch(step)
  local state = call('HGET', BATCHES, step)
  if not state then return end
  if state == 'TRAINED' then move_batch(step, 'TRAINED', 'LEASED_TO_TRAINER') end
  for _, id in ipairs(call('LRANGE', batch(step), 0, -1)) do
    requeue(id, 0, 'step ' .. step .. ' was settled without it: Redis was restored, or the run rolled back')
  end
  call('UNLINK', batch(step))
  call('HDEL', BATCHES, step)
  call('HDEL', BATCH_BYTES, step)
end
