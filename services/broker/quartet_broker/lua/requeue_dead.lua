-- RequeueDead: DEAD -> QUEUED with a fresh delivery count. ARGV: "1" for only those whose completions are kept, else "",
-- then instance ids. Returns OK, number requeued.
local state = run_state()
if not state then return { 'NOT_FOUND' } end
if state ~= 'ACTIVE' then return { 'FINISHED', state } end
local requeued = 0
for n = 2, #ARGV do
  local id = ARGV[n]
  local purpose, pinned, evaluation, reasons, pass, life, stored = unpack(
    call('HMGET', instance(id), 'purpose', 'pinned', 'evaluation', 'reasons', 'pass', 'life', 'stored'))
  if (stored or ARGV[1] == '') and call('ZREM', DEAD, id) == 1 then
    reasons = tonumber(reasons or 0)
    for n = math.max(1, reasons - REASONS_KEPT + 1), reasons do call('HDEL', instance(id), 'reason:' .. n) end
    call('HDEL', instance(id), 'reasons')
    call('HSET', instance(id), 'attempt', 0, 'life', lived(life, moment('Q', now())))
    evaluation = evaluation_of(evaluation)
    if evaluation then call('HINCRBY', evaluation, 'dead', -1) end
    enqueue(id, queue_of(purpose, pinned, stored))
    shift(purpose, 'DEAD', 'QUEUED')
    live(pass, 1)
    requeued = requeued + 1
  end
end
if requeued > 0 then
  call('HDEL', RUN, 'first_dead') -- the reason is presumed fixed
  notify('prompts')
end
return { 'OK', requeued }
