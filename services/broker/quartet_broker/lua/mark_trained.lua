-- MarkTrained: LEASED_TO_TRAINER -> TRAINED, and the policy version advances. ARGV: session epoch, step.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local step = ARGV[2]
local version = number('policy_version')
if tonumber(step) < version then return { 'OK' } end
if tonumber(step) > version then return { 'OUT_OF_ORDER', version } end
if call('HGET', BATCHES, step) ~= 'GRANTED' then return { 'NOT_GRANTED' } end
move_batch(step, 'LEASED_TO_TRAINER', 'TRAINED')
call('HSET', RUN, 'policy_version', version + 1)
ring('prompts')
return { 'OK' }
