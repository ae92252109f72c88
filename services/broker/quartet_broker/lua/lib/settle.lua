-- The end of an instance: it is settled, one line of it is kept, and its result for a while.

-- Results are kept in one pool per purpose, each bounded in bytes and time. Deletes the oldest ones beyond the bounds.
local function trim_results(pool, at)
  local limits = call('HMGET', RUN, 'result_ttl_ms', 'max_result_bytes')
  for _ = 1, 256 do
    local oldest = call('ZRANGE', P .. 'results:' .. pool, 0, 0, 'WITHSCORES')
    if not oldest[1] then return end
    local expired = tonumber(oldest[2]) + limits[1] <= at
    if not expired and gauge('result_bytes:' .. pool) <= tonumber(limits[2]) then return end
    local key = P .. 'result:' .. oldest[1]
    local bytes = call('STRLEN', key)
    call('UNLINK', key)
    call('ZREM', P .. 'results:' .. pool, oldest[1])
    count('result_bytes:' .. pool, -bytes)
  end
end

-- Keeps the transcript of `bytes` bytes that is stored under `name`; 0: there is none.
local function keep_result(id, pool, name, bytes, finished, at)
  if bytes == 0 then return end
  if finished + number('result_ttl_ms') <= at then return call('UNLINK', transcript(name)) end
  local key = P .. 'result:' .. id
  call('RENAME', transcript(name), key)
  call('ZADD', P .. 'results:' .. pool, finished, id)
  count('result_bytes:' .. pool, bytes)
  trim_results(pool, at)
end

-- A data pass is over once prompts of a later one were submitted and none of its own can still be trained.
local function is_over(pass)
  local left = tonumber(call('HGET', PASSES, pass) or 0) + (tallies[PASSES][pass] or 0)
  return pass < number('newest_pass') and left <= 0
end

-- Deletes the oldest settled lines beyond `remembered`. Lines of a pass that is over can go: every submission of that
-- pass is a duplicate from then on. Lines of a current pass stay until there are twice as many, since without its line
-- an instance could be submitted and trained again. Lines without a pass are of instances that only a checkpoint's
-- ledger has named so far; they come in the order of training, from the first pass that was not over. They stay until
-- there are three times as many, since the checkpoint's knowledge of the passes is one commit older than its last steps.
local function forget()
  local most = number('remembered')
  local excess = call('LLEN', SETTLED_ORDER) - most
  for _ = 1, math.min(excess, 2000) do
    local id = call('LINDEX', SETTLED_ORDER, 0)
    local line = call('HGET', SETTLED, id)
    local pass = line and tonumber(string.match(line, '|(%d*)$'))
    if pass and pass >= number('first_pass') then
      if is_over(pass) then
        call('HSET', RUN, 'first_pass', pass + 1)
        call('HDEL', PASSES, pass)
      elseif excess <= most then
        return
      end
    elseif line and not pass and excess <= 2 * most then
      return
    end
    call('LPOP', SETTLED_ORDER)
    call('HDEL', SETTLED, id)
    count('forgotten', 1)
    excess = excess - 1
  end
end

local ENDS = { COMMITTED = 'C', DROPPED = 'D', DELIVERED = 'E' } -- as moments

-- Any state -> COMMITTED, DROPPED or DELIVERED: deletes the instances but for one line each. `from`: their state, if it
-- is not the one in their hash. `why`: the reason of DROPPED.
local function settle(ids, final, at, from, why)
  if #ids == 0 then return end
  local lines, gone, lives, last = {}, {}, {}, moment(ENDS[final], at, why and in_words(why))
  for _, id in ipairs(ids) do
    local h = call('HMGET', instance(id), 'purpose', 'state', 'digest', 'attempt', 'step', 'bytes', 'stored',
      'shown', 'finished', 'pass', 'life', 'taken', 'size', 'by')
    local purpose, bytes, stored = h[1], tonumber(h[6] or 0), h[7]
    count('experience_bytes', -bytes)
    count('prompt_bytes', -(h[13] or 0))
    hold('prompts', h[14], -1)
    hold('bytes', h[14], -(h[13] or 0))
    if UNSCORED[h[2]] then count('unscored_bytes', -bytes) end
    shift(purpose, from or h[2], nil, bytes)
    if h[2] ~= 'DEAD' then live(h[10], -1) end
    if stored then
      table.insert(gone, payload(stored))
      keep_result(id, purpose, stored, tonumber(h[8] or 0), tonumber(h[9]), at)
    end
    table.insert(gone, instance(id))
    table.insert(lines, id)
    table.insert(lines, table.concat({ final, h[3], h[4] or 0, h[5] or -1, h[10] or '' }, '|'))
    local line = final == 'COMMITTED' and last .. ' ' .. (h[5] or -1) or last
    if h[12] then line = 'B ' .. h[12] .. ' ' .. h[5] .. '\n' .. line end
    table.insert(lives, id)
    table.insert(lives, lived(h[11], line))
  end
  unlink_all(gone)
  call_many('HSET', SETTLED, lines)
  call_many('RPUSH', SETTLED_ORDER, ids)
  remember_lives(ids, lives)
  forget()
end
