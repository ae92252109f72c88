-- DropExperience: LEASED_TO_TRAINER -> DROPPED; the batch is SHORT until LeaseExperience fills it.
-- ARGV: session epoch, step, reason, instance ids. Returns OK, number dropped by this call. The batch is written again
-- without them: removing each from the list would take the square of its length.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local step, at, dropped, bytes = ARGV[2], now(), {}, 0
if tonumber(step) < number('committed_step') then return { 'COMMITTED', call('HGET', RUN, 'committed_step') } end
if call('HGET', BATCHES, step) == 'TRAINED' then return { 'TRAINED' } end
local seen = {}
for n = 4, #ARGV do
  local id = ARGV[n]
  if not seen[id] and call('HGET', instance(id), 'step') == step then
    seen[id] = true
    bytes = bytes + call('HGET', instance(id), 'bytes')
    table.insert(dropped, id)
  end
end
if #dropped == 0 then return { 'OK', 0 } end
local left = {}
for _, id in ipairs(call('LRANGE', batch(step), 0, -1)) do
  if not seen[id] then table.insert(left, id) end
end
call('UNLINK', batch(step))
call_many('RPUSH', batch(step), left)
call('HINCRBY', BATCH_BYTES, step, -bytes)
call('HSET', BATCHES, step, 'SHORT')
settle(dropped, 'DROPPED', at, nil, ARGV[3])
count('dropped', #dropped)
notify('prompts')
return { 'OK', #dropped }
