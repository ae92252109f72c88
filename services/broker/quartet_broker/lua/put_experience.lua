-- PutExperience: each group LEASED -> READY, DELIVERED, or QUEUED when it is stale.
--
-- In the same transaction, just before, the broker has stored the bytes of each group under a fresh name. Accepted groups
-- keep them; those of other groups are deleted.
--
-- ARGV: samples per version, then of each group the instance id, lease id, purpose, oldest version, newest version, header
-- ("" for TRAIN), name, bytes of the payload, bytes of the transcript, mean accuracy or "". Returns OK, then the outcome of each; or, without
-- any change, PURPOSE, the index of the group whose purpose is wrong, the instance's purpose.
even_when_full() -- a full Redis has already refused the whole transaction
local FIELDS = 10
local function discard(n) call('UNLINK', payload(ARGV[n + 6]), transcript(ARGV[n + 6])) end
local function discard_all()
  for n = 2, #ARGV, FIELDS do discard(n) end
end

local state = run_state()
if not state then
  discard_all()
  return { 'NOT_FOUND' }
end
local at = now()
local version, staleness, room_bytes, step, wanted, over = unpack(call('HMGET', RUN, 'policy_version', 'max_staleness',
  'max_experience_bytes', 'groups_per_step', 'wanted', 'prompts_ended'))
version, staleness, room_bytes, step = tonumber(version), tonumber(staleness), tonumber(room_bytes), tonumber(step)
local stored, open_bytes = gauge('ready') + gauge('leased_to_trainer'), gauge('open_bytes')

local leases = {}
for n = 2, #ARGV, FIELDS do table.insert(leases, ARGV[n + 1]) end
local expiries = call('ZMSCORE', LEASES, unpack(leases))
local answered, torn, finished, lost = {}, {}, {}, false

-- Has the group's ticket and lease removed when the script ends.
local function take_off(stream, ticket, lease)
  torn[stream] = torn[stream] or {}
  table.insert(torn[stream], ticket)
  table.insert(answered, lease)
end

-- LEASED -> DELIVERED: a group for an evaluation or for serving.
local function deliver(id, h, name, bytes, header)
  keep_result(id, h[2], name, bytes, at, at)
  settle({ id }, 'DELIVERED', at)
  local evaluation = evaluation_of(h[6])
  if evaluation then
    call('HSET', evaluation .. ':headers', id, header)
    call('RPUSH', evaluation .. ':finished', id)
    local bytes = #header + 2 * #id + 128 -- with what Redis adds to them
    call('HINCRBY', evaluation, 'bytes', bytes)
    count('evaluation_bytes', bytes)
    notify('evaluations')
  end
end

-- Emits a transcript as a sample event, for a limited number of groups per version.
local function show(name, bytes)
  if bytes == 0 or bytes > 65536 then return end
  local sampled = call('HMGET', STATS, 'sampled_version', 'sampled')
  local shown = tonumber(sampled[1]) == version and tonumber(sampled[2]) or 0
  if shown >= tonumber(ARGV[1]) then return end
  call('HSET', STATS, 'sampled_version', version, 'sampled', shown + 1)
  emit('sample', call('GET', transcript(name)))
end

local listed, put_line = {}, moment('P', at, '')
local KEPT = { 'state', 'purpose', 'stream', 'ticket', 'pinned', 'evaluation', 'lease', 'life', 'stored', 'owner' }
local known = {}

local function put(n)
  local id, lease, purpose, oldest, newest, header, name, payload_bytes, shown_bytes, accuracy = unpack(
    ARGV, n, n + FIELDS - 1)
  local h = known[n] or call('HMGET', instance(id), unpack(KEPT))
  if OPEN[h[1]] or (not h[1] and call('HEXISTS', SETTLED, id) == 1) then
    count('duplicates', 1)
    return 'DUPLICATE'
  end
  if state ~= 'ACTIVE' then return 'RUN_FINISHED' end
  local expiry = expiries[(n - 2) / FIELDS + 1]
  if h[1] ~= 'LEASED' or h[7] ~= lease or is_foreign(h[10]) or not expiry or tonumber(expiry) <= at then
    lost = true
    return 'LEASE_LOST'
  end
  oldest, newest, shown_bytes = tonumber(oldest), tonumber(newest), tonumber(shown_bytes)
  local bytes = payload_bytes + shown_bytes

  if purpose ~= 'TRAIN' then
    if h[9] then drop_unscored(id) end
    if h[5] and (oldest ~= tonumber(h[5]) or newest ~= oldest) then
      requeue(id, 0, 'of versions ' .. oldest .. ' to ' .. newest .. ', pinned to ' .. h[5])
      return 'STALE'
    end
    call('HSET', instance(id), 'life', lived(h[8], put_line .. ARGV[n + 3]))
    deliver(id, h, name, shown_bytes, header)
    take_off(h[3], h[4], lease)
    table.insert(finished, id)
    return 'ACCEPTED'
  end

  if version - oldest > staleness then
    count('stale', 1)
    if h[9] then drop_unscored(id) end
    -- The delivery did not fail because of the prompt: its deliveries are counted from zero.
    requeue(id, 0, 'put as stale: of version ' .. oldest .. ' at version ' .. version)
    return 'STALE'
  end
  if open_bytes + bytes > room_bytes and stored >= step then return 'NO_ROOM' end
  if h[9] then drop_unscored(id) end

  -- The ticket has what LeaseExperience needs of the group. After a rewind there are weights newer than the run's: they
  -- count as the run's version.
  local order = string.format('%d', math.min(oldest, version))
  local stream = ready(order)
  if not listed[stream] then
    call('ZADD', READY, order, order)
    listed[stream] = true
  end
  local ticket = call('XADD', P .. stream, '*', 'i', id, 's', name, 'b', bytes)
  -- `lease` and `holder` stay in the hash: a lease that is not in LEASES is void.
  call('HSET', instance(id), 'stored', name, 'bytes', bytes, 'shown', shown_bytes, 'finished', at, 'version', oldest,
    'state', 'READY', 'stream', stream, 'ticket', ticket, 'life', lived(h[8], put_line .. ARGV[n + 3]))
  take_off(h[3], h[4], lease)
  table.insert(finished, id)
  stored, open_bytes = stored + 1, open_bytes + bytes
  shift('TRAIN', 'LEASED', 'READY')
  count('open_bytes', bytes)
  count('experience_bytes', bytes)
  if accuracy ~= '' then keep_accuracy(id, accuracy) end
  count('put', 1)
  count('put_bytes', bytes)
  show(name, shown_bytes)
  return 'ACCEPTED'
end

-- A call with a wrong purpose is refused as a whole, before any change.
local seen = {}
for n = 2, #ARGV, FIELDS do
  local id = ARGV[n]
  if not seen[id] then known[n] = call('HMGET', instance(id), unpack(KEPT)) end -- else it may change on the way
  seen[id] = seen[id] or known[n]
  if seen[id][2] and ARGV[n + 2] ~= seen[id][2] then
    discard_all()
    return { 'PURPOSE', (n - 2) / FIELDS, seen[id][2] }
  end
end

local reply = { 'OK' }
for n = 2, #ARGV, FIELDS do
  local outcome = put(n)
  if outcome ~= 'ACCEPTED' then discard(n) end
  table.insert(reply, outcome)
end
for stream, tickets in pairs(torn) do remove_tickets(stream, tickets) end
if #answered > 0 then call('ZREM', LEASES, unpack(answered)) end
if #finished > 0 then notify_results(finished) end
if lost then expire_leases(at, 100) end
-- Wake the trainer only when there may be enough for it.
if #finished > 0 and (gauge('ready') >= tonumber(wanted or 1) or over == '1') then notify('experience') end
return reply
