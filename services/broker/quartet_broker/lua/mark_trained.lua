-- MarkTrained: LEASED_TO_TRAINER -> TRAINED, and the policy version advances. ARGV: session epoch, step, then
-- the batch that was trained, or nothing.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local step = ARGV[2]
local version = number('policy_version')
-- A Redis that was restored from an earlier state may have another batch for the step, or one with dropped groups in it.
if #ARGV > 2 and call('HEXISTS', BATCHES, step) == 1 then
  if table.concat(ARGV, '\n', 3) ~= table.concat(call('LRANGE', batch(step), 0, -1), '\n') then
    return { 'OTHER_BATCH' }
  end
end
if tonumber(step) < version then return { 'OK' } end
if tonumber(step) > version then return { 'OUT_OF_ORDER', version } end
if call('HGET', BATCHES, step) ~= 'GRANTED' then return { 'NOT_GRANTED' } end
move_batch(step, 'LEASED_TO_TRAINER', 'TRAINED')
call('HSET', RUN, 'policy_version', version + 1)
notify('prompts')
return { 'OK' }
