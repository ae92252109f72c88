-- RenewLeases: LEASED stays LEASED. ARGV: lease ids. Returns OK, new expiry, then the leases that are lost.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local at = now()
local expiry = at + number('prompt_lease_ttl_ms')
local reply = { 'OK', expiry }
for _, lease in ipairs(ARGV) do
  if state == 'ACTIVE' and leased(lease, at) then
    call('ZADD', LEASES, expiry, lease)
  else
    table.insert(reply, lease)
  end
end
return reply
