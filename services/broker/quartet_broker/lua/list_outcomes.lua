-- CollectResults: the outcome of each instance. ARGV: instance ids.
-- Returns OK, then of each: DONE, DEAD, WAIT, STORED, GONE (its result was deleted) or UNKNOWN; when it was finished or
-- died, else 0.
if not run_state() then return { 'NOT_FOUND' } end
local reply = { 'OK' }
for _, id in ipairs(ARGV) do
  local state, finished = unpack(call('HMGET', instance(id), 'state', 'finished'))
  local outcome, at = 'UNKNOWN', 0
  if state == 'DEAD' then
    outcome, at = 'DEAD', call('ZSCORE', DEAD, id)
  elseif finished then
    outcome, at = 'DONE', finished
  elseif state == 'STORED' then
    outcome = 'STORED'
  elseif state then
    outcome = 'WAIT'
  elseif call('EXISTS', P .. 'result:' .. id) == 1 then
    outcome = 'DONE'
    for _, pool in ipairs({ 'TRAIN', 'SERVE', 'EVALUATE' }) do
      at = call('ZSCORE', P .. 'results:' .. pool, id) or at
    end
  elseif call('HEXISTS', SETTLED, id) == 1 then
    outcome = 'GONE'
  end
  table.insert(reply, outcome)
  table.insert(reply, at)
end
return reply
