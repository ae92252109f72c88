-- EndPrompts: no more training prompts will come.
if not run_state() then return { 'NOT_FOUND' } end
call('HSET', RUN, 'prompts_ended', 1)
ring('experience')
return { 'OK' }
