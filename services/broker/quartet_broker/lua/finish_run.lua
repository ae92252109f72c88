-- FinishRun: the first outcome stands. ARGV: state, reason, event, number of the RunEnding, steps committed.
-- Returns OK; or BEHIND, steps committed here.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
if state == 'ACTIVE' then
  if number('committed_step') < tonumber(ARGV[5]) then return { 'BEHIND', number('committed_step') } end
  call('HSET', RUN, 'state', ARGV[1], 'reason', ARGV[2], 'ending', ARGV[4], 'ended', now())
  emit('event', ARGV[3])
  ring('*')
end
return { 'OK' }
