-- FinishRun: only the first outcome is recorded. ARGV: state, reason, event, number of the RunEnding, steps committed.
-- Returns OK; or BEHIND, steps committed here.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local made_by, trained_by = unpack(call('HMGET', RUN, 'made_by', 'trained_by'))
if is_foreign(made_by) and trained_by ~= CALLER then return denied('the run', made_by) end
if state == 'ACTIVE' then
  if number('committed_step') < tonumber(ARGV[5]) then return { 'BEHIND', number('committed_step') } end
  local event = emit('event', ARGV[3])
  call('HSET', RUN, 'state', ARGV[1], 'reason', ARGV[2], 'ending', ARGV[4], 'ended', now(), 'end_event', event)
  notify('*')
end
return { 'OK' }
