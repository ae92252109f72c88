-- LeaveMember. ARGV: id. Returns OK, group epoch.
even_when_full()
if not run_state() then return { 'NOT_FOUND' } end
drop_member(ARGV[1], 'it left')
return { 'OK', call('HGET', RUN, 'group_epoch') }
