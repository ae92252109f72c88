-- DeleteRun, first half: from here on the run does not exist for anyone. ARGV: "1" to delete an active run too.
even_when_full()
local state = call('HGET', RUN, 'state')
if not state then return { 'NOT_FOUND' } end
if state == 'ACTIVE' and ARGV[1] ~= '1' then return { 'ACTIVE' } end
call('HSET', RUN, 'state', 'DELETING')
ring('*')
return { 'OK' }
