-- Heartbeat: the member lives another ttl. ARGV: id, state, mark, member, event.
-- Returns OK, group epoch, run's state, run's policy version; or GONE.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
local at, id = now(), ARGV[1]
expire_members(at)
local refusal = not_this_member(id)
if refusal then return refusal end
local key = P .. 'member:' .. id
local state, mark = unpack(call('HMGET', key, 'state', 'mark'))
if not state then return { 'GONE' } end
call('HSET', key, 'state', ARGV[2], 'mark', ARGV[3], 'beat', ARGV[4])
call('ZADD', MEMBERS, at + number('member_ttl_ms'), id)
if state ~= ARGV[2] then emit('event', ARGV[5]) end
if mark ~= ARGV[3] then notify('members') end
return { 'OK', unpack(call('HMGET', RUN, 'group_epoch', 'state', 'policy_version')) }
