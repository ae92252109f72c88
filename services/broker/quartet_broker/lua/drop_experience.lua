-- DropExperience: LEASED_TO_TRAINER -> DROPPED; the batch is SHORT until it is topped up.
-- ARGV: session epoch, step, instance ids. Returns OK, number dropped by this call.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local step, at, dropped = ARGV[2], now(), 0
if tonumber(step) < number('committed_step') then return { 'COMMITTED', call('HGET', RUN, 'committed_step') } end
if call('HGET', BATCHES, step) == 'TRAINED' then return { 'TRAINED' } end
for n = 3, #ARGV do
  local id = ARGV[n]
  if call('HGET', instance(id), 'step') == step then
    call('LREM', batch(step), 0, id)
    settle(id, 'DROPPED', at)
    dropped = dropped + 1
  end
end
if dropped > 0 then
  call('HSET', BATCHES, step, 'SHORT')
  count('dropped', dropped)
  ring('prompts')
end
return { 'OK', dropped }
