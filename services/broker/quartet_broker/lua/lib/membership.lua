-- Members: q:{run}:member:ID has a member's registration and last heartbeat, the sorted set q:{run}:members its expiry.

-- Who asks for training prompts, and until when.
local ASKING = P .. 'asking'
-- The leases of training prompts that a member was granted, in a sorted set; those that have ended may be in it.
local function held_by(id) return P .. 'held:' .. id end

-- The refusal of a call about a member that the holder of another certificate registered; nil if it is allowed.
local function not_this_member(id)
  local owner = call('HGET', P .. 'member:' .. id, 'owner')
  if is_foreign(owner) then return denied('member ' .. id, owner) end
end

-- Removes a member. If it is a rollout, the group epoch grows.
local function drop_member(id, reason)
  local key = P .. 'member:' .. id
  local h = call('HMGET', key, 'kind', 'registration', 'owner')
  if call('ZREM', MEMBERS, id) == 0 then return end
  call('UNLINK', key, held_by(id))
  call('ZREM', ASKING, id)
  hold('members', h[3], -1)
  if h[1] == 'ROLLOUT' then call('HINCRBY', RUN, 'group_epoch', 1) end
  emit('gone', h[2], 'reason', reason)
  notify('members')
end

local function expire_members(at)
  for _, id in ipairs(call('ZRANGEBYSCORE', MEMBERS, '-inf', at, 'LIMIT', 0, 100)) do
    drop_member(id, 'no heartbeat came in time')
  end
end
