-- ReportProgress. ARGV: event, "1" if only the trainer may report it, id of the member that a notice is from or "".
-- Returns OK, event id.
if not run_state() then return { 'NOT_FOUND' } end
local trained_by = call('HGET', RUN, 'trained_by')
if ARGV[2] == '1' and is_foreign(trained_by) then return denied("the run's training", trained_by) end
local refusal = not_this_member(ARGV[3])
if refusal then return refusal end
return { 'OK', emit('event', ARGV[1]) }
