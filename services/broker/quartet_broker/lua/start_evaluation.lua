-- StartEvaluation: STORED prompts of a set -> new QUEUED instances, pinned to a policy version or of the live policy.
-- ARGV: evaluation id, version or "", then instance id, digest, prompt of each. Returns OK, number of prompts; or
-- CONFLICT, instance id; or OVERFLOW, bytes of prompts, maximum.
local state = run_state()
if not state then return { 'NOT_FOUND' } end
local evaluation, version = ARGV[1], ARGV[2]
local key = P .. 'evaluation:' .. evaluation
local prompts = call('HGET', key, 'prompts')
if prompts then return { 'OK', prompts } end
if state ~= 'ACTIVE' then return { 'FINISHED', state } end
for n = 3, #ARGV, 3 do
  local id = ARGV[n]
  if call('EXISTS', instance(id)) == 1 or call('HEXISTS', SETTLED, id) == 1 then return { 'CONFLICT', id } end
end
local total, bytes = (#ARGV - 2) / 3, 0
for n = 3, #ARGV, 3 do bytes = bytes + size_of(#ARGV[n + 2]) end
-- Twice the limit: submitted prompts alone never prevent their evaluation.
local kept = prompts_overflow(bytes, 2)
if kept then return { 'OVERFLOW', kept, 2 * number('max_prompt_bytes') } end
local guest = guest_of_the_run()
local refusal = guest ~= '' and over_share('bytes', bytes, number('max_prompt_bytes'))
if refusal then return refusal end
hold('prompts', guest, total)
hold('bytes', guest, bytes)
count('prompt_bytes', bytes)
-- Deletes the oldest complete evaluations while there are too many bytes of headers. Runs of older brokers have no limit.
for _, id in ipairs(call('LRANGE', P .. 'evaluations', 0, 63)) do
  if gauge('evaluation_bytes') <= (number('max_evaluation_bytes') or math.huge) then break end
  local old = P .. 'evaluation:' .. id
  local asked, dead, held = unpack(call('HMGET', old, 'prompts', 'dead', 'bytes'))
  if call('LLEN', old .. ':finished') + dead >= tonumber(asked) then
    call('UNLINK', old, old .. ':headers', old .. ':finished')
    call('LREM', P .. 'evaluations', 1, id)
    count('evaluation_bytes', -(held or 0))
  end
end
call('RPUSH', P .. 'evaluations', evaluation)
call('HSET', key, 'prompts', total, 'dead', 0)
for n = 3, #ARGV, 3 do
  local id = ARGV[n]
  call('HSET', instance(id), 'digest', ARGV[n + 1], 'purpose', 'EVALUATE', 'prompt', ARGV[n + 2], 'attempt', 0,
    'evaluation', evaluation, 'size', size_of(#ARGV[n + 2]), 'by', guest)
  if version ~= '' then call('HSET', instance(id), 'pinned', version) end
  enqueue(id, version ~= '' and 'prompts:pin:' .. version or 'prompts:serve')
  shift('EVALUATE', nil, 'QUEUED')
end
notify('prompts')
return { 'OK', total }
