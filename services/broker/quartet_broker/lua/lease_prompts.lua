-- LeasePrompts: QUEUED -> LEASED. ARGV: holder, most, holder's policy version, nonce of this grant, bytes of prompts that
-- the answer has room for; one prompt is granted whatever its size.
-- Returns OK, gate, run's policy version, expiry, then lease id, attempt, prompt, ticket (whose first part is when the
-- prompt was queued), and "1" if completions of it wait for a score, of each.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
if state ~= 'ACTIVE' then return { 'ENDED', state } end
local at, holder, most, version, answer = now(), ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local is_full = false
local alive = call('ZSCORE', MEMBERS, holder)
if not alive or tonumber(alive) <= at then return { 'NOT_MEMBER' } end
local refusal = not_this_member(holder)
if refusal then return refusal end
expire_leases(at, 100)

local h = call('HMGET', RUN, 'policy_version', 'max_staleness', 'groups_per_step', 'max_experience_bytes',
  'prompt_lease_ttl_ms')
local newest, staleness, step, room_bytes, ttl = unpack(h)
local reply, expiries = { 'OK', '', newest, at + ttl }, {}

local leased_line = moment('L', at, in_words(holder))

-- The id after which a stream's tickets wait.
local function last_delivered(stream)
  local group = call('XINFO', 'GROUPS', P .. stream)[1]
  for n = 1, #group, 2 do
    if group[n] == 'last-delivered-id' then return group[n + 1] end
  end
end

local function grant(stream, n)
  if n <= 0 or is_full or call('EXISTS', P .. stream) == 0 then return 0 end
  local granted = 0
  for _, entry in ipairs(call('XRANGE', P .. stream, '(' .. last_delivered(stream), '+', 'COUNT', n)) do
    local id = entry[2][2]
    local lease = ARGV[4] .. '-' .. #reply .. ':' .. id
    local purpose, prompt, attempt, life, stored = unpack(
      call('HMGET', instance(id), 'purpose', 'prompt', 'attempt', 'life', 'stored'))
    is_full = #prompt > answer and #expiries > 0
    if is_full then break end
    answer, granted, attempt = answer - #prompt, granted + 1, attempt + 1
    call('HSET', instance(id), 'state', 'LEASED', 'lease', lease, 'holder', holder, 'owner', CALLER, 'attempt',
      attempt, 'life', lived(life, leased_line))
    shift(purpose, 'QUEUED', 'LEASED')
    if attempt > 1 then count('redelivered', 1) end
    for _, value in ipairs({ at + ttl, lease }) do table.insert(expiries, value) end
    for _, value in ipairs({ lease, attempt, prompt, entry[1], stored and '1' or '' }) do table.insert(reply, value) end
  end
  -- One consumer name for all: a consumer per rollout would outlive its rollout. The holder stands in the instance.
  if granted > 0 then call('XREADGROUP', 'GROUP', 'rollouts', 'lease', 'COUNT', granted, 'STREAMS', P .. stream, '>') end
  return granted
end

-- The grants' leases begin all at once.
local function granted_all()
  call_many('ZADD', LEASES, expiries)
  return reply
end

-- Evaluation and serving come first and are not gated.
most = most - grant('prompts:pin:' .. ARGV[3], most)
most = most - grant('prompts:serve', most)
if most == 0 or is_full then return granted_all() end

-- The gate. `under_way` groups will fill steps newest, newest + 1, ...; one more would be trained too late for the
-- weights this rollout has, if there were this many already.
local leased_now = gauge('leased')
local under_way = leased_now + gauge('ready') + gauge('leased_to_trainer')
local steps_ahead = math.min(version, tonumber(newest)) - newest + staleness + 1
local by_staleness = steps_ahead * step - under_way
-- Expect of each running group the mean size so far. Never less than a batch: a limit below one would stop the run.
local mean = gauge('put_bytes') / math.max(1, gauge('put'))
local by_memory = by_staleness
if mean > 0 then
  by_memory = math.max(math.floor((room_bytes - gauge('open_bytes')) / mean) - leased_now, step - under_way)
end

local room = math.min(most, by_staleness, by_memory)
local granted = grant('prompts:again', room)
granted = granted + grant('prompts:train', room - granted)
if granted < most and not is_full then
  if granted < room then
    reply[2] = 'NO_PROMPTS'
  elseif by_staleness <= by_memory then
    reply[2] = 'STALENESS'
  else
    reply[2] = 'MEMORY'
  end
end
return granted_all()
