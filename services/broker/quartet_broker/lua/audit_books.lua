-- AuditRun: checks a run's books atomically. Reads only.
-- ARGV: what a scan of the keys found, as four lists, each preceded by its length: streams, steps of batches, names under
-- which groups are stored, instance ids. Newer instances are found from the streams and batches.
-- Returns OK, the run's fields, the counts as kept (name, value, ...), the recounted ones, descriptions of faults, number
-- of further faults.
if not run_state() then return { 'NOT_FOUND' } end

local MOST_FAULTS = 200
local faults, more = {}, 0
local function fault(...)
  if #faults == MOST_FAULTS then
    more = more + 1
  else
    table.insert(faults, string.format(...))
  end
end

local recounted = {}
local function recount(name, by) recounted[name] = (recounted[name] or 0) + by end
local function pairs_of(list)
  local found = {}
  for n = 1, #list, 2 do found[list[n]] = list[n + 1] end
  return found
end

-- All instances: those that were scanned, and those that streams, batches, leases or the dead name.
local ids, known = {}, {}
local function name_instance(id)
  if not known[id] then
    known[id] = true
    table.insert(ids, id)
  end
end
local function portion(first)
  local part, last = {}, first + ARGV[first]
  for n = first + 1, last do table.insert(part, ARGV[n]) end
  return part, last + 1
end
local streams, steps, stored_names, scanned, at
streams, at = portion(1)
steps, at = portion(at)
stored_names, at = portion(at)
scanned = portion(at)
for _, id in ipairs(scanned) do name_instance(id) end

-- Tickets: id -> {{stream, entry}, ...}. Tickets up to the consumer group's cursor were delivered.
local tickets, cursors = {}, {}
local function place(stream)
  for _, entry in ipairs(call('XRANGE', P .. stream, '-', '+')) do
    local id = entry[2][2]
    name_instance(id)
    tickets[id] = tickets[id] or {}
    table.insert(tickets[id], { stream = stream, entry = entry[1] })
  end
end
local expected = { ['prompts:train'] = 1, ['prompts:again'] = 1, ['prompts:serve'] = 1 }
for _, stream in ipairs(streams) do
  if not is_ready(stream) or call('EXISTS', P .. stream) == 1 then expected[stream] = 1 end
end
for _, version in ipairs(call('ZRANGE', READY, 0, -1)) do expected[ready(version)] = 1 end
for stream in pairs(expected) do
  if is_ready(stream) then
    place(stream)
    if not call('ZSCORE', READY, string.sub(stream, 7)) then fault('no list names %s: its groups reach no batch', stream) end
  elseif call('EXISTS', P .. stream) == 1 then
    for _, group in ipairs(call('XINFO', 'GROUPS', P .. stream)) do
      cursors[stream] = pairs_of(group)['last-delivered-id']
    end
    if not cursors[stream] then fault('%s has no consumer group: no prompt in it can be leased', stream) end
    place(stream)
  end
end
local function was_delivered(stream, entry)
  local cursor = cursors[stream] or '0-0'
  local at, n = string.match(entry, '(%d+)-(%d+)')
  local cursor_at, cursor_n = string.match(cursor, '(%d+)-(%d+)')
  at, n, cursor_at, cursor_n = tonumber(at), tonumber(n), tonumber(cursor_at), tonumber(cursor_n)
  return at < cursor_at or (at == cursor_at and n <= cursor_n)
end

-- Batches: id -> {step, ...}.
local batches, bytes_kept, batched = pairs_of(call('HGETALL', BATCHES)), pairs_of(call('HGETALL', BATCH_BYTES)), {}
local bytes_found = {}
local all_steps = {}
for _, step in ipairs(steps) do all_steps[step] = 1 end
for step in pairs(batches) do all_steps[step] = 1 end
local version, committed = number('policy_version'), number('committed_step')
for step in pairs(all_steps) do
  local members = call('LRANGE', batch(step), 0, -1)
  local state = batches[step]
  if not state and #members > 0 then
    fault('the batch of step %s has %d groups and no state', step, #members)
  elseif state and tonumber(step) < committed then
    fault('the batch of step %s is kept, though steps below %d are committed', step, committed)
  elseif state == 'TRAINED' and tonumber(step) >= version then
    fault('the batch of step %s is TRAINED, but the policy version is %d', step, version)
  elseif state == 'GRANTED' and tonumber(step) < version then
    fault('the batch of step %s is not TRAINED, but the policy version is %d', step, version)
  end
  for _, id in ipairs(members) do
    name_instance(id)
    batched[id] = batched[id] or {}
    table.insert(batched[id], step)
  end
end

-- Leases and the dead.
local leases = {}
for _, lease in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  local id = string.match(lease, '^[^:]*:(.*)$')
  leases[lease] = true
  if not id then
    fault('the lease %s names no instance', lease)
  else
    name_instance(id)
    local state, held = unpack(call('HMGET', instance(id), 'state', 'lease'))
    if not state then
      fault('the lease %s is of %s, which is not there', lease, id)
    elseif state ~= 'LEASED' or held ~= lease then
      fault('the lease %s is of %s, which is %s without it', lease, id, state)
    end
  end
end
for _, member in ipairs(call('ZRANGE', MEMBERS, 0, -1)) do
  for _, lease in ipairs(call('ZRANGE', held_by(member), 0, -1)) do
    local of = leases[lease] and call('HGET', instance(string.match(lease, '^[^:]*:(.*)$')), 'holder') or member
    if of ~= member then fault('the lease %s of %s counts toward the share of %s', lease, of, member) end
  end
end
local dead = {}
for _, id in ipairs(call('ZRANGE', DEAD, 0, -1)) do
  dead[id] = true
  name_instance(id)
end

local QUEUE = { QUEUED = 1, LEASED = 1 }
local function check_tickets(id, state, stream, ticket)
  local found = false
  for _, place_of in ipairs(tickets[id] or {}) do
    if place_of.stream == stream and place_of.entry == ticket and (QUEUE[state] or state == 'READY') then
      found = true
    else
      fault('a stream entry in %s names %s, which is %s with another entry or none', place_of.stream, id, state)
    end
  end
  if not (QUEUE[state] or state == 'READY') then return end
  if not found then
    fault('%s is %s, but has no stream entry in %s', id, state, stream or 'any stream')
  elseif is_ready(stream) ~= (state == 'READY') then
    fault('%s is %s, but its stream entry is in %s', id, state, stream)
  elseif state == 'QUEUED' and was_delivered(stream, ticket) then
    fault('%s is QUEUED, but its stream entry was delivered: no rollout will lease it', id)
  elseif state == 'LEASED' and not was_delivered(stream, ticket) then
    fault('%s is LEASED, but its stream entry was not delivered', id)
  end
end

-- The state of a group in a batch is the batch's.
local function check_batch(id, state, step)
  local of = batched[id] or {}
  if #of > 1 then fault('%s is in two batches, of steps %s and %s', id, of[1], of[2]) end
  for _, at in ipairs(of) do
    if state ~= 'LEASED_TO_TRAINER' then
      fault('the batch of step %s names %s, which is %s', at, id, state)
    elseif step ~= at then
      fault('the batch of step %s names %s, which is of step %s', at, id, step or 'none')
    end
  end
  if state == 'LEASED_TO_TRAINER' and #of == 0 then fault('%s is LEASED_TO_TRAINER, but in no batch', id) end
  if state == 'LEASED_TO_TRAINER' and batches[of[1] or step] == 'TRAINED' then return 'TRAINED' end
  return state
end

local owned = {} -- names under which the groups of instances are stored
local STATES = { STORED = 1, QUEUED = 1, LEASED = 1, READY = 1, LEASED_TO_TRAINER = 1, DEAD = 1 }
for _, id in ipairs(ids) do
  local key = instance(id)
  local state, purpose, stream, ticket, lease, step, bytes, pass, name, size = unpack(
    call('HMGET', key, 'state', 'purpose', 'stream', 'ticket', 'lease', 'step', 'bytes', 'pass', 'stored', 'size'))
  if not state then
    if call('EXISTS', key) == 1 then fault('%s has no state', id) end
    for _, place_of in ipairs(tickets[id] or {}) do
      fault('a stream entry in %s names %s, which does not exist', place_of.stream, id)
    end
    for _, at in ipairs(batched[id] or {}) do fault('the batch of step %s names %s, which is not there', at, id) end
    if dead[id] then fault('%s is among the dead, but is not there', id) end
  elseif not STATES[state] then
    fault('%s has the state %s, which there is not', id, state)
  else
    check_tickets(id, state, stream, ticket)
    if state == 'LEASED' and not leases[lease or ''] then fault('%s is LEASED without a lease', id) end
    if (state == 'DEAD') ~= (dead[id] or false) then
      fault(dead[id] and '%s is among the dead, but is %s' or '%s is DEAD, but not among the dead', id, state)
    end
    if call('HEXISTS', SETTLED, id) == 1 then fault('%s is settled and %s at once', id, state) end
    if size then recount('prompt_bytes', size) end
    local stands = check_batch(id, state, step)
    -- Counts. Of instances that are not for training, only those in progress are counted.
    if state == 'DEAD' then
      recount('dead', 1)
    elseif purpose == 'TRAIN' then
      if GAUGES[stands] then recount(GAUGES[stands], 1) end
      if pass then recount('pass ' .. pass, 1) end
    elseif OUTSIDE[state] then
      recount('untrained_in_flight', 1)
    end
    if bytes then
      local stored = call('STRLEN', payload(name)) + call('STRLEN', transcript(name))
      if stored ~= tonumber(bytes) then fault('%s has %d bytes, but says %s', id, stored, bytes) end
      owned[name] = true
      recount('experience_bytes', stored)
      if UNSCORED[state] then recount('unscored_bytes', stored) end
      if OPEN[stands] then recount('open_bytes', stored) end
      local at = (batched[id] or {})[1]
      if at then bytes_found[at] = (bytes_found[at] or 0) + stored end
    end
  end
end
for step in pairs(all_steps) do
  local kept, found = tonumber(bytes_kept[step] or 0), bytes_found[step] or 0
  if kept ~= found then fault('the batch of step %s has %d bytes, but says %d', step, found, kept) end
end

for _, name in ipairs(stored_names) do
  if not owned[name] and call('EXISTS', payload(name), transcript(name)) > 0 then
    fault('a group is stored as %s, but is no instance\'s', name)
  end
end

local kept = call('HGETALL', STATS)
for _, value in ipairs({ 'dead', call('ZCARD', DEAD) }) do table.insert(kept, value) end
local passes = call('HGETALL', PASSES)
for n = 1, #passes, 2 do
  table.insert(kept, 'pass ' .. passes[n])
  table.insert(kept, passes[n + 1])
end
local recount = {}
for name, value in pairs(recounted) do
  table.insert(recount, name)
  table.insert(recount, value)
end
local run = call('HMGET', RUN, 'state', 'policy_version', 'committed_step', 'prompts_ended', 'first_pass',
  'settle_to')
return { 'OK', run, kept, recount, faults, more }
