-- Backup: all keys of the run as of one moment. Returns OK, the fields of the run that a backup names, the keys of
-- values, which never change and are read afterwards, and key, DUMP, ... of all others.
if not run_state() then return { 'NOT_FOUND' } end
local VALUES = { 'payload:', 'transcript:', 'result:' }
local function is_value(key)
  for _, kind in ipairs(VALUES) do
    if string.sub(key, #P + 1, #P + #kind) == kind then return true end
  end
  return false
end

local seen, values, books, cursor = {}, {}, {}, '0'
repeat
  local portion = call('SCAN', cursor, 'MATCH', P .. '*', 'COUNT', 10000)
  cursor = portion[1]
  for _, key in ipairs(portion[2]) do
    if not seen[key] then
      seen[key] = true
      if is_value(key) then
        table.insert(values, key)
      else
        table.insert(books, key)
        table.insert(books, call('DUMP', key))
      end
    end
  end
until cursor == '0'
return { 'OK', call('HMGET', RUN, 'created', 'policy_version', 'committed_step'), values, books }
