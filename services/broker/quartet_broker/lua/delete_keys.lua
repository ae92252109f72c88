-- DeleteRun: unlinks keys that a scan found, unless the run was recreated meanwhile. ARGV: the keys.
even_when_full()
if call('HGET', RUN, 'state') ~= 'DELETING' then return { 'NOT_FOUND' } end
for _, key in ipairs(ARGV) do call('UNLINK', key) end
return { 'OK' }
