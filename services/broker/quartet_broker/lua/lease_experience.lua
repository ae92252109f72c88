-- LeaseExperience: READY -> LEASED_TO_TRAINER, a whole batch or nothing; the step's manifest is saved with it, so the
-- same step always has the same batch. ARGV: session epoch, step.
-- Returns GRANTED, "1" if granted before, "1" if it is the last, then instance id and name of what it is made of, of
-- each; or SHORT, ready, needed, "1" if over.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
if run_state() ~= 'ACTIVE' then return { 'ENDED' } end
local step, at = tonumber(ARGV[2]), now()
local name = string.format('%d', step)
if step < number('committed_step') then return { 'COMMITTED', call('HGET', RUN, 'committed_step') } end

-- `names`: those under which its groups are stored, where they are known.
local function granted(before, names)
  local last = prompts_are_over() and call('XLEN', READY) == 0 and next_step() == step + 1
  local reply = { 'GRANTED', before and 1 or 0, last and 1 or 0 }
  for _, id in ipairs(call('LRANGE', batch(name), 0, -1)) do
    table.insert(reply, id)
    table.insert(reply, names[id] or call('HGET', instance(id), 'stored'))
  end
  return reply
end

local state = call('HGET', BATCHES, name)
if state == 'GRANTED' or state == 'TRAINED' then return granted(true, {}) end
local due = next_step()
if not state and step ~= due then return { 'OUT_OF_ORDER', due } end

-- What became too old goes back as prompts.
local fresh, oldest = {}, step - number('max_staleness')
for _, entry in ipairs(call('XRANGE', READY, '-', '+')) do
  local id, version = entry[2][2], tonumber(entry[2][4])
  if version < oldest then
    count('stale', 1)
    requeue(id, 0)
  else
    local stored, bytes = entry[2][6], tonumber(entry[2][8])
    table.insert(fresh, { id = id, version = version, ticket = entry[1], place = #fresh, name = stored, bytes = bytes })
  end
end

local have = call('LLEN', batch(name))
local needed = number('groups_per_step') - have
local over = prompts_are_over()
local partial = call('HGET', RUN, 'partial_batch')
if #fresh < needed and over and partial == 'DROP' then
  -- The last groups do not make a batch: drop them, those of a batch cut short by DropExperience included.
  local tickets, ids = {}, call('LRANGE', batch(name), 0, -1)
  settle(ids, 'DROPPED', at)
  ids = {}
  for _, group in ipairs(fresh) do
    table.insert(tickets, group.ticket)
    table.insert(ids, group.id)
  end
  tear('ready', tickets)
  settle(ids, 'DROPPED', at)
  call('UNLINK', batch(name))
  call('HDEL', BATCHES, name)
  call('HDEL', BATCH_BYTES, name)
  count('dropped', #fresh + have)
  return { 'SHORT', 0, needed, 1 }
elseif #fresh < needed and not (over and #fresh + have > 0) then
  call('HSET', RUN, 'wanted', needed)
  return { 'SHORT', #fresh, needed, over and 1 or 0 }
end

-- Of equal weights the one that was ready first. FIFO goes by weights too: a group that others overtook on its way here
-- would be too old for the step after.
local sign = call('HGET', RUN, 'lease_order') == 'FRESH_FIRST' and -1 or 1
table.sort(fresh, function(a, b)
  if a.version ~= b.version then return sign * a.version < sign * b.version end
  return a.place < b.place
end)
local tickets, ids, bytes, names = {}, {}, 0, {}
for n = 1, math.min(needed, #fresh) do
  local group = fresh[n]
  table.insert(tickets, group.ticket)
  table.insert(ids, group.id)
  names[group.id] = group.name
  bytes = bytes + group.bytes
  call('HSET', instance(group.id), 'state', 'LEASED_TO_TRAINER', 'step', name)
end
tear('ready', tickets)
if #ids > 0 then call_many('RPUSH', batch(name), ids) end
call('HSET', BATCHES, name, 'GRANTED')
call('HINCRBY', BATCH_BYTES, name, bytes)
shift('TRAIN', 'READY', 'LEASED_TO_TRAINER', nil, #ids)
return granted(false, names)
