-- CreateRun: makes the run unless it exists. ARGV: spec, spec event, then field, value, ... of the run's hash.
local state = call('HGET', RUN, 'state')
if state == 'DELETING' then return { 'DELETING' } end
if state then
  run_state()
  return { 'EXISTS', call('HGET', RUN, 'spec') }
end
call('HSET', RUN, 'layout', LAYOUT, 'state', 'ACTIVE', 'reason', '', 'spec', ARGV[1], 'created', now(), 'policy_version', 0,
  'committed_step', 0, 'prompts_ended', 0, 'session', 0, 'group_epoch', 0, 'newest_pass', 0, 'first_pass', 0,
  'ledger', '0 ', unpack(ARGV, 3))
emit('event', ARGV[2])
return { 'OK' }
