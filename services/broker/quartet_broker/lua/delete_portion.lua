-- DeleteRun, second half: unlinks what the run's own lists name, a bounded part per call. Returns OK, 1 if some is left.
-- What no list names, e.g. the prompts of evaluation sets, is found by a scan; see runs.py.
even_when_full()
if call('HGET', RUN, 'state') ~= 'DELETING' then return { 'NOT_FOUND' } end
-- The lists of other layouts are unknown here: the scan finds everything.
if call('HGET', RUN, 'layout') ~= LAYOUT then return { 'OK', 0 } end
local PORTION, left = 100, 500

local function unlink_instances(ids)
  for _, id in ipairs(ids) do
    local stored = call('HGET', instance(id), 'stored')
    if stored then call('UNLINK', payload(stored), transcript(stored)) end
    call('UNLINK', instance(id))
  end
  left = left - #ids
end

-- Removes portions until the list is empty (true) or the call has done enough (false). `take` returns a portion's size.
local function empty(take)
  while left > 0 do
    if take() == 0 then return true end
  end
  return false
end

local function of_stream(stream)
  return function()
    local tickets, ids = {}, {}
    for _, entry in ipairs(call('XRANGE', P .. stream, '-', '+', 'COUNT', PORTION)) do
      table.insert(tickets, entry[1])
      table.insert(ids, entry[2][2])
    end
    unlink_instances(ids)
    if #tickets > 0 then call('XDEL', P .. stream, unpack(tickets)) end
    return #ids
  end
end

local function of_batch(step)
  return function()
    local ids = call('LPOP', batch(step), PORTION) or {}
    unlink_instances(ids)
    return #ids
  end
end

-- Unlinks what the members of a sorted set name.
local function of_set(key, unlink)
  return function()
    local found, names = call('ZPOPMIN', key, PORTION), {}
    for n = 1, #found, 2 do table.insert(names, found[n]) end
    unlink(names)
    return #names
  end
end
local function unlink_each(prefix)
  return function(names)
    for _, name in ipairs(names) do call('UNLINK', P .. prefix .. name) end
    left = left - #names
  end
end

for _, stream in ipairs({ 'prompts:train', 'prompts:again', 'prompts:serve' }) do
  if not empty(of_stream(stream)) then return { 'OK', 1 } end
end
for _, version in ipairs(call('ZRANGE', READY, 0, -1)) do
  if not empty(of_stream(ready(version))) then return { 'OK', 1 } end
  call('UNLINK', P .. ready(version))
end
for _, step in ipairs(call('HKEYS', BATCHES)) do
  if not empty(of_batch(step)) then return { 'OK', 1 } end
end
if not empty(of_set(DEAD, unlink_instances)) then return { 'OK', 1 } end
if not empty(of_set(MEMBERS, unlink_each('member:'))) then return { 'OK', 1 } end
for _, pool in ipairs({ 'TRAIN', 'SERVE', 'EVALUATE' }) do
  if not empty(of_set(P .. 'results:' .. pool, unlink_each('result:'))) then return { 'OK', 1 } end
end
-- In one call however large they are: Redis frees what was unlinked on another thread.
call('UNLINK', STATS, LEASES, BATCHES, BATCH_BYTES, SETTLED, SETTLED_ORDER, PASSES, LIVES, LIVES_ORDER, P .. 'events',
  P .. 'prompts:train', P .. 'prompts:again', P .. 'prompts:serve', P .. 'evaluations', READY, CALLERS, SOLVES, SOURCES)
return { 'OK', 0 }
