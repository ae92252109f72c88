-- OpenSession: fences older sessions and rewinds to the checkpoint: TRAINED -> LEASED_TO_TRAINER for later steps.
-- ARGV: holder, steps in the checkpoint, "1" if its ledger will be settled, number of consumed ids that are settled next
-- if not, first data pass that was not over at the checkpoint, event if there is a checkpoint, else "".
-- Returns OK, session epoch, number of steps to be replayed, steps committed, steps trained until now, "STEPS DIGEST" of
-- the ledger; or BEHIND, steps committed; or UNCOVERED, the first step that is missing, first step that the ids cover.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
local refusal = not_this_member(ARGV[1])
if refusal then return refusal end
local trainer, owner = unpack(call('HMGET', RUN, 'trainer', 'trained_by'))
local alive = is_foreign(owner) and call('ZSCORE', MEMBERS, trainer)
if alive and tonumber(alive) > now() then return denied("the run's session", owner) end
local checkpoint = tonumber(ARGV[2])
local committed, version = number('committed_step'), number('policy_version')
if checkpoint < committed then return { 'BEHIND', committed } end
if ARGV[3] ~= '1' then
  -- The ids are those of the checkpoint's last steps. Redis must have the steps before them.
  local covered = math.max(committed, checkpoint - math.ceil(ARGV[4] / number('groups_per_step')))
  for step = committed, covered - 1 do
    if call('HGET', BATCHES, step) ~= 'TRAINED' then return { 'UNCOVERED', step, covered } end
  end
end

-- By the clock, so that no epoch is used twice even if Redis lost the newest one.
local epoch = math.max(number('session') + 1, now())
call('HSET', RUN, 'session', string.format('%d', epoch), 'trainer', ARGV[1], 'trained_by', CALLER,
  'policy_version', checkpoint, 'settle_to',
  checkpoint, 'first_pass', math.max(number('first_pass'), tonumber(ARGV[5])))
local replayable = 0
for _, step in ipairs(call('HKEYS', BATCHES)) do
  local state = call('HGET', BATCHES, step)
  if tonumber(step) >= checkpoint and state ~= 'SHORT' then
    replayable = replayable + 1
    if state == 'TRAINED' then move_batch(step, 'TRAINED', 'LEASED_TO_TRAINER') end
  end
end
if ARGV[6] ~= '' and run_state() == 'ACTIVE' then emit('event', ARGV[6]) end
notify('prompts')
return { 'OK', epoch, replayable, committed, version, call('HGET', RUN, 'ledger') or '' }
