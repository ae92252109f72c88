-- What happened to an instance, for people: one line a moment, "KIND MILLISECONDS DETAIL", in the field `life` of its hash
-- and, when it is settled, in the hash q:{run}:lives, which holds the most recently settled ones. dead.py reads them.
local LIVES, LIVES_ORDER = P .. 'lives', P .. 'lives:order'
local LONGEST_LIFE, LONGEST_DETAIL = 2000, 200 -- bytes

-- A moment's line. What many instances have in common is written once.
local function moment(kind, at, detail) return kind .. ' ' .. at .. (detail and ' ' .. detail or '') end
-- A detail that somebody chose.
local function in_words(text) return (string.gsub(string.sub(text, 1, LONGEST_DETAIL), '%s+', ' ')) end

-- A life with one more moment. Of a long one the first line and the last ones are kept.
local function lived(life, line)
  if not life then return line end
  life = life .. '\n' .. line
  if #life <= LONGEST_LIFE then return life end
  return string.match(life, '^[^\n]*') .. string.match(string.sub(life, -LONGEST_LIFE / 2), '\n.*$')
end

-- Keeps the lives of instances that were settled: id, life, ...
local function remember_lives(ids, lives)
  local most = number('remembered_lives') or 0 -- a run that an older broker made has no such number
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
