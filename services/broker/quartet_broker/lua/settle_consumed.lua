-- OpenSession's guard: what the checkpoint says was trained is COMMITTED, wherever a Redis that lost the end of its log
-- believes it to be. ARGV: session epoch, instance ids. Returns OK, number of instances that were elsewhere.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local at, found = now(), 0
for n = 2, #ARGV do
  local id = ARGV[n]
  local state, stream, ticket, lease, step = unpack(
    call('HMGET', instance(id), 'state', 'stream', 'ticket', 'lease', 'step'))
  if state then
    found = found + 1
    if ticket and (state == 'QUEUED' or state == 'LEASED' or state == 'READY') then tear(stream, { ticket }) end
    if lease then call('ZREM', LEASES, lease) end
    if state == 'DEAD' then call('ZREM', DEAD, id) end
    local from
    if step then
      from = state_in(step)
      take_out(id, step)
    end
    settle({ id }, 'COMMITTED', at, from)
    count('committed', 1)
  elseif call('HEXISTS', SETTLED, id) == 0 then
    -- Even its submission was forgotten: no content is known, any will do as the same.
    found = found + 1
    call('HSET', SETTLED, id, 'COMMITTED||1|-1|')
    call('RPUSH', SETTLED_ORDER, id)
    count('committed', 1)
  end
end
if found > 0 then ring('prompts') end
return { 'OK', found }
