-- CreateRun with `extend`: SUCCEEDED -> ACTIVE. An active run too gets the new specification and accepts prompts again.
-- ARGV: the current specification, the new one, event.
-- Returns OK; or CHANGED: the current specification is another; or OVER, state.
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local stands, made_by = unpack(call('HMGET', RUN, 'spec', 'made_by'))
if is_foreign(made_by) then return denied('the run', made_by) end
if stands ~= ARGV[1] then return { 'CHANGED' } end
if state ~= 'ACTIVE' and state ~= 'SUCCEEDED' then return { 'OVER', state } end
call('HSET', RUN, 'spec', ARGV[2], 'state', 'ACTIVE', 'reason', '', 'ending', 0, 'prompts_ended', 0)
call('HDEL', RUN, 'ended')
if state == 'SUCCEEDED' then emit('event', ARGV[3]) end
notify('*')
return { 'OK' }
