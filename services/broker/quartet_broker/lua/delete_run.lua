-- DeleteRun, first half: from here on no call finds the run. ARGV: "1" to delete an active run too; when the run must
-- have ended, or "".
even_when_full()
local state, ended, made_by = unpack(call('HMGET', RUN, 'state', 'ended', 'made_by'))
if not state then return { 'NOT_FOUND' } end
if is_foreign(made_by) then return denied('the run', made_by) end
if state == 'ACTIVE' and ARGV[1] ~= '1' then return { 'ACTIVE' } end
if ARGV[2] ~= '' and ARGV[2] ~= ended then return { 'NOT_FOUND' } end -- another run, of the same name
call('HSET', RUN, 'state', 'DELETING')
notify('*')
return { 'OK' }
