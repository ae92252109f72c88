-- The history of an instance: lines of "KIND MILLISECONDS DETAIL" in the field `life` of its hash or, once it is
-- settled, in the hash q:{run}:lives, which has the most recently settled ones. results.py reads them.
local LIVES, LIVES_ORDER = P .. 'lives', P .. 'lives:order'
local LONGEST_LIFE, LONGEST_DETAIL = 2000, 200 -- bytes

-- A line of a history.
local function moment(kind, at, detail) return kind .. ' ' .. at .. (detail and ' ' .. detail or '') end
-- Text of callers as a detail: short, on one line.
local function in_words(text) return (string.gsub(string.sub(text, 1, LONGEST_DETAIL), '%s+', ' ')) end

-- A history with one more line. Of a long one the first line and the last ones are kept.
local function lived(life, line)
  if not life then return line end
  life = life .. '\n' .. line
  if #life <= LONGEST_LIFE then return life end
  return string.match(life, '^[^\n]*') .. string.match(string.sub(life, -LONGEST_LIFE / 2), '\n.*$')
end

-- Keeps the histories of settled instances. `lives`: id, history, ...
local function remember_lives(ids, lives)
  local most = number('remembered_lives') or 0 -- nil in runs of older brokers
  if most == 0 then return end
  call_many('HSET', LIVES, lives)
  call_many('RPUSH', LIVES_ORDER, ids)
  local excess = call('LLEN', LIVES_ORDER) - most
  while excess > 0 do
    local gone = call('LPOP', LIVES_ORDER, math.min(excess, MOST_ARGUMENTS))
    call('HDEL', LIVES, unpack(gone))
    excess = excess - #gone
  end
end
