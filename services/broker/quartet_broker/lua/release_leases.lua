-- ReleaseLeases: LEASED -> QUEUED or DEAD. ARGV: lease id, failure or "", "1" if permanent, of each.
-- Returns OK, requeued, dead, why the run should end (`hopeless`), then the leases that were lost before.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
local at = now()
local reply = { 'OK', 0, 0, '' }
for n = 1, #ARGV, 3 do
  local lease, failure, permanent = ARGV[n], ARGV[n + 1], ARGV[n + 2] == '1'
  local id = leased(lease, at)
  if not id then
    table.insert(reply, lease)
  elseif failure == '' and not permanent then
    -- A drain: the delivery does not count.
    requeue(id, call('HGET', instance(id), 'attempt') - 1, 'given back')
    reply[2] = reply[2] + 1
  elseif fail(id, failure ~= '' and failure or 'refused for good, without a reason', permanent, at) then
    reply[3] = reply[3] + 1
  else
    reply[2] = reply[2] + 1
  end
end
reply[4] = hopeless()
return reply
