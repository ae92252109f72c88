-- DeleteRun, second half: unlinks keys, unless the run was made anew meanwhile. ARGV: the keys.
if call('HGET', RUN, 'state') ~= 'DELETING' then return { 'NOT_FOUND' } end
for _, key in ipairs(ARGV) do call('UNLINK', key) end
return { 'OK' }
