-- Members: q:{run}:member:ID is what a member last said; the sorted set q:{run}:members says until when it lives.

-- The refusal of a member's call that the holder of another certificate makes than registered it; nil if it may.
local function not_this_member(id)
  local owner = call('HGET', P .. 'member:' .. id, 'owner')
  if is_foreign(owner) then return denied('member ' .. id, owner) end
end

-- Takes a member out; the set of rollouts changed, so the group epoch grows.
local function drop_member(id, reason)
  local key = P .. 'member:' .. id
  local h = call('HMGET', key, 'kind', 'registration', 'owner')
  if call('ZREM', MEMBERS, id) == 0 then return end
  call('UNLINK', key)
  hold('members', h[3], -1)
  if h[1] == 'ROLLOUT' then call('HINCRBY', RUN, 'group_epoch', 1) end
  emit('gone', h[2], 'reason', reason)
  ring('members')
end

local function expire_members(at)
  for _, id in ipairs(call('ZRANGEBYSCORE', MEMBERS, '-inf', at, 'LIMIT', 0, 100)) do
    drop_member(id, 'no heartbeat came in time')
  end
end
