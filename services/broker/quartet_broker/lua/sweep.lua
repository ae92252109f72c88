-- Ends expired leases and members and deletes old results, a bounded number per call.
-- Returns OK, run's state, number of leases that expired, why the run should end (`hopeless`); of a run that
-- has ended: when it did, milliseconds since then.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local at = now()
expire_members(at)
for _, pool in ipairs({ 'TRAIN', 'SERVE', 'EVALUATE' }) do trim_results(pool, at) end
local reply, ended = { 'OK', state, expire_leases(at, 500), '' }, call('HGET', RUN, 'ended')
reply[4] = hopeless()
if ended then
  table.insert(reply, ended)
  table.insert(reply, at - ended)
end
return reply
