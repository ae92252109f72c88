-- PutExperience, one group: LEASED -> READY, DELIVERED, or QUEUED when it is stale. The payload is opaque.
-- ARGV: instance id, lease id, purpose, oldest version, newest version, header, tensors, transcript, samples a step.
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local id, lease, purpose, oldest, newest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local header, tensors, transcript = ARGV[6], ARGV[7], ARGV[8]

local h = call('HMGET', instance(id), 'state', 'purpose', 'stream', 'ticket', 'pinned', 'evaluation')
if OPEN[h[1]] or h[1] == 'TRAINED' or (not h[1] and call('HEXISTS', SETTLED, id) == 1) then
  count('duplicates', 1)
  return { 'DUPLICATE' }
end
if state ~= 'ACTIVE' then return { 'RUN_FINISHED' } end
local at = now()
if h[1] ~= 'LEASED' or leased(lease, at) ~= id then
  expire_leases(at, 100)
  return { 'LEASE_LOST' }
end
if purpose ~= h[2] then return { 'PURPOSE', h[2] } end

if purpose ~= 'TRAIN' then
  if h[5] and (oldest ~= tonumber(h[5]) or newest ~= oldest) then
    requeue(id, 0)
    return { 'STALE' }
  end
  keep_result(id, purpose, transcript, at, at)
  tear(h[3], h[4])
  call('ZREM', LEASES, lease)
  settle(id, 'DELIVERED', at)
  if h[6] then
    call('HSET', P .. 'evaluation:' .. h[6] .. ':headers', id, header)
    call('RPUSH', P .. 'evaluation:' .. h[6] .. ':finished', id)
    ring('evaluations')
  end
  ring('result ' .. id)
  return { 'ACCEPTED' }
end

local version = number('policy_version')
if version - oldest > number('max_staleness') then
  count('stale', 1)
  requeue(id, 0) -- the prompt is not to blame: its deliveries start anew
  return { 'STALE' }
end
local bytes = #header + #tensors + #transcript
local stored = gauge('ready') + gauge('leased_to_trainer')
if gauge('open_bytes') + bytes > number('max_experience_bytes') and stored >= number('groups_per_step') then
  return { 'NO_ROOM' }
end

call('HSET', instance(id), 'header', header, 'tensors', tensors, 'transcript', transcript, 'bytes', bytes,
  'finished', at, 'version', oldest, 'state', 'READY')
tear(h[3], h[4])
call('ZREM', LEASES, lease)
call('HDEL', instance(id), 'lease', 'holder')
local ticket = call('XADD', READY, '*', 'i', id, 'v', oldest)
call('HSET', instance(id), 'stream', 'ready', 'ticket', ticket)
shift('TRAIN', 'LEASED', 'READY')
count('open_bytes', bytes)
count('experience_bytes', bytes)
count('put', 1)
count('put_bytes', bytes)

-- A bounded share of the groups is shown to people.
local sampled = call('HMGET', STATS, 'sampled_version', 'sampled')
local shown = tonumber(sampled[1]) == version and tonumber(sampled[2]) or 0
if shown < tonumber(ARGV[9]) and #transcript <= 65536 then
  call('HSET', STATS, 'sampled_version', version, 'sampled', shown + 1)
  emit('sample', transcript)
end
ring('result ' .. id)
-- Wake the trainer only when there may be enough for it.
if call('XLEN', READY) >= tonumber(call('HGET', RUN, 'wanted') or 1) or call('HGET', RUN, 'prompts_ended') == '1' then
  ring('experience')
end
return { 'ACCEPTED' }
