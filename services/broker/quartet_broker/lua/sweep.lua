-- What time does to a run, a bounded part of it a call: leases and members end, results are let go.
-- Returns OK, run's state, number of leases that expired.
even_when_full()
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local at = now()
expire_members(at)
for _, pool in ipairs({ 'TRAIN', 'SERVE', 'EVALUATE' }) do trim_results(pool, at) end
return { 'OK', state, expire_leases(at, 500) }
