-- Commit: TRAINED -> COMMITTED for the steps below `step`, a bounded number of groups per call.
-- ARGV: session epoch, step, "1" if OpenSession calls. Returns OK, groups committed by this call, 1 if steps are left,
-- the first data pass that is not over.
local refusal = refuse(ARGV[1], ARGV[3] == '1')
if refusal then return refusal end
local target = tonumber(ARGV[2])
local version = number('policy_version')
if target > version then return { 'OUT_OF_ORDER', version } end
local at, groups, left = now(), 0, false
local steps = call('HKEYS', BATCHES)
table.sort(steps, function(a, b) return tonumber(a) < tonumber(b) end)
for _, step in ipairs(steps) do
  if tonumber(step) >= target then break end
  left = groups >= 2000
  if left then break end
  if state_in(step) == 'TRAINED' then
    local ids = call('LRANGE', batch(step), 0, -1)
    settle(ids, 'COMMITTED', at, 'TRAINED')
    count('committed', #ids)
    call('UNLINK', batch(step))
    call('HDEL', BATCHES, step)
    call('HDEL', BATCH_BYTES, step)
    advance(step, ids)
    groups = groups + #ids
  else
    -- Only within OpenSession, which has already settled what the trainer did train of it.
    requeue_batch(step)
  end
end
if not left and target > number('committed_step') then call('HSET', RUN, 'committed_step', target) end
return { 'OK', groups, left and 1 or 0, number('first_pass') }
