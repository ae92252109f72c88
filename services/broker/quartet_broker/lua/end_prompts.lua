-- EndPrompts: no more training prompts will come. ARGV: the last instance that was submitted, or "".
if not run_state() then return { 'NOT_FOUND' } end
local made_by = call('HGET', RUN, 'made_by')
if is_foreign(made_by) then return denied('the run', made_by) end
if is_forgotten(ARGV[1]) then return { 'FORGOTTEN' } end
call('HSET', RUN, 'prompts_ended', 1)
notify('experience')
return { 'OK' }
