-- OpenSession: fences older sessions and rewinds to the checkpoint: TRAINED -> LEASED_TO_TRAINER for later steps.
-- ARGV: holder, steps in the checkpoint. Returns OK, session epoch, number of steps to be replayed.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
local checkpoint = tonumber(ARGV[2])
local committed = number('committed_step')
if checkpoint < committed then return { 'BEHIND', committed } end

-- By the clock, so that an epoch is not given twice even if Redis forgot the newest one.
local epoch = math.max(number('session') + 1, now())
call('HSET', RUN, 'session', string.format('%d', epoch), 'trainer', ARGV[1], 'policy_version', checkpoint)
local replayable = 0
for _, step in ipairs(call('HKEYS', BATCHES)) do
  local state = call('HGET', BATCHES, step)
  if tonumber(step) >= checkpoint and state ~= 'SHORT' then
    replayable = replayable + 1
    if state == 'TRAINED' then move_batch(step, 'TRAINED', 'LEASED_TO_TRAINER') end
  end
end
ring('prompts')
return { 'OK', epoch, replayable }
