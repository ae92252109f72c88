-- LeaseExperience: READY -> LEASED_TO_TRAINER, a whole batch or nothing. The batch is recorded, so that the same step
-- always gets the same one. ARGV: session epoch, step.
-- Returns GRANTED, 1 if granted before, 1 if it is the last, then of each group the instance id, the name under which it
-- is stored, and its bytes; or SHORT, ready, needed, 1 if the data has ended.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
if run_state() ~= 'ACTIVE' then return { 'ENDED' } end
local step, at = tonumber(ARGV[2]), now()
local name = string.format('%d', step)
if step < number('committed_step') then return { 'COMMITTED', call('HGET', RUN, 'committed_step') } end

-- `taken`: name and bytes of the groups that this call removed from the queue, by instance id.
local function granted(before, taken)
  local last = prompts_are_over() and call('ZCARD', READY) == 0 and next_step() == step + 1
  local reply = { 'GRANTED', before and 1 or 0, last and 1 or 0 }
  for _, id in ipairs(call('LRANGE', batch(name), 0, -1)) do
    local name, bytes = unpack(taken[id] or call('HMGET', instance(id), 'stored', 'bytes'))
    table.insert(reply, id)
    table.insert(reply, name)
    table.insert(reply, bytes)
  end
  return reply
end

local state = call('HGET', BATCHES, name)
if state == 'GRANTED' or state == 'TRAINED' then return granted(true, {}) end
local due = next_step()
if not state and step ~= due then return { 'OUT_OF_ORDER', due } end

-- Groups that became too old are requeued as prompts.
local function entries(version, most) return call('XRANGE', P .. ready(version), '-', '+', 'COUNT', most) end
local too_old = string.format('(%d', step - number('max_staleness'))
for _, version in ipairs(call('ZRANGEBYSCORE', READY, '-inf', too_old)) do
  for _, entry in ipairs(entries(version, call('XLEN', P .. ready(version)))) do
    count('stale', 1)
    requeue(entry[2][2], 0, 'stale: of version ' .. version .. ' for step ' .. name)
  end
end

-- Groups of one policy version are leased in the order in which they became ready. FIFO leases the oldest versions first:
-- otherwise a group that newer ones overtook would be too old for the next step.
local newest_first = call('HGET', RUN, 'lease_order') == 'FRESH_FIRST'
local versions, fresh = call(newest_first and 'ZREVRANGE' or 'ZRANGE', READY, 0, -1), 0
for _, version in ipairs(versions) do fresh = fresh + call('XLEN', P .. ready(version)) end

-- Removes at most `most` groups from their streams and calls `take` with the entry of each.
local function take_off(most, take)
  for _, version in ipairs(versions) do
    if most == 0 then return end
    local tickets = {}
    for _, entry in ipairs(entries(version, most)) do
      table.insert(tickets, entry[1])
      take(entry[2])
    end
    remove_tickets(ready(version), tickets)
    most = most - #tickets
  end
end

local have = call('LLEN', batch(name))
local needed = number('groups_per_step') - have
local over = prompts_are_over()
local partial = call('HGET', RUN, 'partial_batch')
if fresh < needed and over and partial == 'DROP' then
  -- The last groups do not make a batch: drop them, those of a batch cut short by DropExperience included.
  local why = 'the last groups do not make a batch'
  settle(call('LRANGE', batch(name), 0, -1), 'DROPPED', at, nil, why)
  local ids = {}
  take_off(fresh, function(group) table.insert(ids, group[2]) end)
  settle(ids, 'DROPPED', at, nil, why)
  call('UNLINK', batch(name))
  call('HDEL', BATCHES, name)
  call('HDEL', BATCH_BYTES, name)
  count('dropped', fresh + have)
  return { 'SHORT', 0, needed, 1 }
elseif fresh < needed and not (over and fresh + have > 0) then
  call('HSET', RUN, 'wanted', needed)
  return { 'SHORT', fresh, needed, over and 1 or 0 }
end

local ids, bytes, taken = {}, 0, {}
take_off(math.min(needed, fresh), function(group)
  local id = group[2]
  table.insert(ids, id)
  taken[id], bytes = { group[4], group[6] }, bytes + group[6]
  call('HSET', instance(id), 'state', 'LEASED_TO_TRAINER', 'step', name, 'taken', at)
end)
if #ids > 0 then call_many('RPUSH', batch(name), ids) end
call('HSET', BATCHES, name, 'GRANTED')
call('HINCRBY', BATCH_BYTES, name, bytes)
shift('TRAIN', 'READY', 'LEASED_TO_TRAINER', nil, #ids)
return granted(false, taken)
