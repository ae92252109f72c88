-- LeasePrompts: QUEUED -> LEASED, or DROPPED if the curriculum skips it. ARGV: holder, maximum prompts, holder's policy version, nonce of this grant, maximum
-- bytes of prompts (one prompt is granted whatever its size), for how many milliseconds the holder waits; then of each
-- caller that began to wait at this broker since the last call, its holder, milliseconds.
-- Returns OK, gate, run's policy version, expiry, then of each prompt the lease id, attempt, prompt, ticket (whose first
-- part is when it was queued), and "1" if completions of it wait for a score.
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

-- A member asks while it waits, and `STILL_ASKS` milliseconds after that: between two calls it does, too.
local STILL_ASKS = 1000
local function asks(member, milliseconds) call('ZADD', ASKING, at + milliseconds + STILL_ASKS, member) end
for n = 7, #ARGV, 2 do asks(ARGV[n], ARGV[n + 1]) end

local h = call('HMGET', RUN, 'policy_version', 'max_staleness', 'groups_per_step', 'max_experience_bytes',
  'prompt_lease_ttl_ms')
local newest, staleness, step, room_bytes, ttl = unpack(h)
local reply, expiries = { 'OK', '', newest, at + ttl }, {}

local leased_line = moment('L', at, in_words(holder))

-- The id of the last delivered ticket of a stream.
local function last_delivered(stream)
  local group = call('XINFO', 'GROUPS', P .. stream)[1]
  for n = 1, #group, 2 do
    if group[n] == 'last-delivered-id' then return group[n + 1] end
  end
end

local function grant(stream, n)
  if n <= 0 or is_full or call('EXISTS', P .. stream) == 0 then return 0 end
  if stream == 'prompts:train' then n = skip_prompts(n, last_delivered(stream), at) end
  if n == 0 then return 0 end -- COUNT 0 would be all of them
  local granted = 0
  for _, entry in ipairs(call('XRANGE', P .. stream, '(' .. last_delivered(stream), '+', 'COUNT', n)) do
    local id = entry[2][2]
    local lease = ARGV[4] .. '-' .. #reply .. ':' .. id
    local purpose, prompt, attempt, life, stored, source = unpack(
      call('HMGET', instance(id), 'purpose', 'prompt', 'attempt', 'life', 'stored', 'source'))
    is_full = #prompt > answer and #expiries > 0
    if is_full then break end
    answer, granted, attempt = answer - #prompt, granted + 1, attempt + 1
    call('HSET', instance(id), 'state', 'LEASED', 'lease', lease, 'holder', holder, 'owner', CALLER, 'attempt',
      attempt, 'life', lived(life, leased_line))
    shift(purpose, 'QUEUED', 'LEASED')
    if attempt > 1 then count('redelivered', 1) end
    if stream == 'prompts:train' then of_source('used', source, 1) end
    for _, value in ipairs({ at + ttl, lease }) do table.insert(expiries, value) end
    for _, value in ipairs({ lease, attempt, prompt, entry[1], stored and '1' or '' }) do table.insert(reply, value) end
  end
  -- All rollouts share one consumer, since Redis would keep a consumer per rollout for ever. The instance has the holder
  -- and the lease: with NOACK Redis writes one command to its log, else one for each prompt.
  if granted > 0 then
    call('XREADGROUP', 'GROUP', 'rollouts', 'lease', 'COUNT', granted, 'NOACK', 'STREAMS', P .. stream, '>')
  end
  return granted
end

-- Records the expiries of all grants.
local function granted_all()
  call_many('ZADD', LEASES, expiries)
  return reply
end

-- Evaluation and serving come first and have no admission limit.
most = most - grant('prompts:pin:' .. ARGV[3], most)
most = most - grant('prompts:serve', most)
if most == 0 or is_full then return granted_all() end

-- The admission limit. The groups `under_way` will fill the steps newest, newest + 1, ...; a group beyond the limit would
-- be too old, with this rollout's weights, when it is trained.
local leased_now = gauge('leased')
local under_way = leased_now + gauge('ready') + gauge('leased_to_trainer')
local steps_ahead = math.min(version, tonumber(newest)) - newest + staleness + 1
local by_staleness = steps_ahead * step - under_way
-- Running groups are expected to have the mean size so far. A batch is always admitted: otherwise the run would stop.
local mean = gauge('put_bytes') / math.max(1, gauge('put'))
local by_memory = by_staleness
if mean > 0 then
  by_memory = math.max(math.floor((room_bytes - gauge('open_bytes')) / mean) - leased_now, step - under_way)
end

-- The fair share: of the leases that those who ask hold and could get, each may hold an equal part; one that asks alone
-- may hold all.
local function fair_share(room)
  asks(holder, ARGV[6])
  for _, member in ipairs(call('ZRANGEBYSCORE', ASKING, '-inf', at)) do call('ZREM', ASKING, member) end
  local leases, ended = call('ZRANGE', held_by(holder), 0, MOST_ARGUMENTS), {}
  for n, expiry in ipairs(#leases > 0 and call('ZMSCORE', LEASES, unpack(leases)) or {}) do
    if not expiry then table.insert(ended, leases[n]) end
  end
  call_many('ZREM', held_by(holder), ended)
  local asking, mine, shared = call('ZCARD', ASKING), call('ZCARD', held_by(holder)), math.max(0, room)
  if asking == 1 then return shared end
  -- What the others hold is counted, member by member, only if it decides.
  local at_least = math.ceil((shared + mine) / asking) - mine
  if at_least >= most then return at_least end
  for _, member in ipairs(call('ZRANGE', ASKING, 0, -1)) do shared = shared + call('ZCARD', held_by(member)) end
  return math.max(0, math.ceil(shared / asking) - mine)
end

local by_share = fair_share(math.min(by_staleness, by_memory))
local room, before = math.min(most, by_staleness, by_memory, by_share), #expiries
local granted = grant('prompts:again', room)
granted = granted + grant('prompts:train', room - granted)
local held = {}
for n = before + 2, #expiries, 2 do held[#held + 1], held[#held + 2] = 0, expiries[n] end
call_many('ZADD', held_by(holder), held)
if granted < most and not is_full then
  if granted < room then
    reply[2] = 'NO_PROMPTS'
  elseif by_share < math.min(by_staleness, by_memory) then
    reply[2] = 'SHARE'
  elseif by_staleness <= by_memory then
    reply[2] = 'STALENESS'
  else
    reply[2] = 'MEMORY'
  end
end
return granted_all()
