-- RegisterMember: a member lives for a ttl. ARGV: id, kind, address, state, mark, member, event, most
-- members. Returns OK, group epoch; or FULL, members.
if not run_state() then return { 'NOT_FOUND' } end
local at, id, kind, address = now(), ARGV[1], ARGV[2], ARGV[3]
expire_members(at)
local refusal = not_this_member(id)
if refusal then return refusal end
local alive = call('ZCARD', MEMBERS)
if alive >= tonumber(ARGV[8]) and not call('ZSCORE', MEMBERS, id) then return { 'FULL', alive } end
local key = P .. 'member:' .. id
local known, owner = unpack(call('HMGET', key, 'address', 'owner'))
if CALLER ~= '' and owner ~= CALLER then
  refusal = over_share('members', 1, tonumber(ARGV[8]))
  if refusal then return refusal end
  hold('members', CALLER, 1)
  call('HSET', key, 'owner', CALLER)
end
call('HSET', key, 'kind', kind, 'address', address, 'state', ARGV[4], 'mark', ARGV[5], 'registration', ARGV[6])
call('HDEL', key, 'beat')
call('ZADD', MEMBERS, at + number('member_ttl_ms'), id)
if known ~= address and kind == 'ROLLOUT' then call('HINCRBY', RUN, 'group_epoch', 1) end
if not known then emit('event', ARGV[7]) end
notify('members')
return { 'OK', call('HGET', RUN, 'group_epoch') }
