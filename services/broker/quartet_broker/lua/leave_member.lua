-- LeaveMember. ARGV: id. Returns OK, group epoch.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
local refusal = not_this_member(ARGV[1])
if refusal then return refusal end
drop_member(ARGV[1], 'it left')
return { 'OK', call('HGET', RUN, 'group_epoch') }
