-- ReleaseLeases: LEASED -> QUEUED or DEAD. In the same transaction, just before, the broker has stored the completions on
-- which a verifier failed, each group's under a fresh name.
--
-- ARGV: of each lease its id, failure or "", "1" if permanent, that name or "", bytes stored under it. Returns OK, number
-- requeued, number dead, why the run should end (`hopeless`), then the leases that were lost before.
even_when_full()
local FIELDS = 5
if not run_state() then
  for n = 1, #ARGV, FIELDS do call('UNLINK', payload(ARGV[n + 3])) end
  return { 'NOT_FOUND' }
end
local at, most = now(), number('max_experience_bytes')
local reply = { 'OK', 0, 0, '' }

-- Keeps the completions. Returns the failure, with a remark if there is no room for them.
local function keep(id, failure, name, bytes)
  local others = gauge('unscored_bytes') - tonumber(call('HGET', instance(id), 'bytes') or 0)
  if others + bytes <= most then
    keep_unscored(id, name, bytes)
    return failure
  end
  call('UNLINK', payload(name))
  return failure .. string.format('; its %d bytes of completions are not kept: others that wait for a score hold %d of %d',
    bytes, others, most)
end

for n = 1, #ARGV, FIELDS do
  local lease, failure, permanent, name = ARGV[n], ARGV[n + 1], ARGV[n + 2] == '1', ARGV[n + 3]
  if failure == '' and permanent then failure = 'refused for good, without a reason' end
  local id, failed = leased(lease, at), failure ~= ''
  if name ~= '' then
    if id then
      failure = keep(id, failure, name, tonumber(ARGV[n + 4]))
    else
      call('UNLINK', payload(name))
    end
  end
  if not id then
    table.insert(reply, lease)
  elseif not failed then
    -- The rollout drains: the delivery does not count.
    requeue(id, call('HGET', instance(id), 'attempt') - 1, 'given back')
    reply[2] = reply[2] + 1
  elseif fail(id, failure, permanent, at) then
    reply[3] = reply[3] + 1
  else
    reply[2] = reply[2] + 1
  end
end
reply[4] = hopeless()
return reply
