-- ReportProgress. ARGV: event. Returns OK, event id.
if not run_state() then return { 'NOT_FOUND' } end
return { 'OK', emit('event', ARGV[1]) }
