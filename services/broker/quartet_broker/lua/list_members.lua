-- WatchMembers, GetRun: live members. Returns OK, group epoch, then registration and last heartbeat of each, by id.
if not run_state() then return { 'NOT_FOUND' } end
local ids = call('ZRANGEBYSCORE', MEMBERS, '(' .. now(), '+inf')
table.sort(ids)
local reply = { 'OK', call('HGET', RUN, 'group_epoch') }
for _, id in ipairs(ids) do
  local said = call('HMGET', P .. 'member:' .. id, 'registration', 'beat')
  table.insert(reply, said[1])
  table.insert(reply, said[2] or '')
end
return reply
