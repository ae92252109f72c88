-- DropExperience: LEASED_TO_TRAINER -> DROPPED; the batch is SHORT until LeaseExperience fills it.
-- ARGV: session epoch, step, reason, instance ids. Returns OK, number dropped by this call.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local step, at, dropped = ARGV[2], now(), {}
if tonumber(step) < number('committed_step') then return { 'COMMITTED', call('HGET', RUN, 'committed_step') } end
if call('HGET', BATCHES, step) == 'TRAINED' then return { 'TRAINED' } end
local seen = {}
for n = 4, #ARGV do
  local id = ARGV[n]
  if not seen[id] and call('HGET', instance(id), 'step') == step then
    seen[id] = true
    take_out(id, step)
    table.insert(dropped, id)
  end
end
settle(dropped, 'DROPPED', at, nil, ARGV[3])
count('dropped', #dropped)
if #dropped > 0 then notify('prompts') end
return { 'OK', #dropped }
