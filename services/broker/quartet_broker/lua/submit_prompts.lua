-- SubmitPrompts: (nothing) -> QUEUED, or STORED for an evaluation set. All or nothing.
-- ARGV: set name or "", then id, digest, purpose, pinned version or "", prompt of each.
local state = run_state()
if not state then return { 'NOT_FOUND' } end
if state ~= 'ACTIVE' then return { 'FINISHED', state } end

local fresh, queued, trained, duplicates = {}, 0, 0, 0
for at = 2, #ARGV, 5 do
  local id, digest, purpose = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local known = call('HGET', instance(id), 'digest')
  if not known then
    local line = call('HGET', SETTLED, id)
    known = line and string.match(line, '^%u+|([^|]*)|')
  end
  if not known then
    table.insert(fresh, at)
    if purpose ~= 'EVALUATE' then queued = queued + 1 end
    if purpose == 'TRAIN' then trained = trained + 1 end
  elseif known ~= digest and known ~= '' then -- '': known only as consumed, from a checkpoint
    return { 'CONFLICT', id }
  else
    duplicates = duplicates + 1
  end
end
if trained > 0 and call('HGET', RUN, 'prompts_ended') == '1' then return { 'ENDED' } end
-- Serving prompts keep their tickets, and so their place in the queue, until they are answered.
local limit, waiting = number('max_queued_prompts'), gauge('queued') + call('XLEN', P .. 'prompts:serve')
if queued > limit then return { 'TOO_MANY', limit } end
if queued > 0 and waiting + queued > limit then return { 'FULL', waiting, limit } end

for _, at in ipairs(fresh) do
  local id, digest, purpose, pinned, prompt = unpack(ARGV, at, at + 4)
  call('HSET', instance(id), 'digest', digest, 'purpose', purpose, 'prompt', prompt, 'attempt', 0, 'state', 'STORED')
  if purpose == 'EVALUATE' then
    call('RPUSH', P .. 'set:' .. ARGV[1], id)
  else
    if pinned ~= '' then call('HSET', instance(id), 'pinned', pinned) end
    local stream = 'prompts:train'
    if purpose == 'SERVE' then stream = pinned ~= '' and 'prompts:pin:' .. pinned or 'prompts:serve' end
    enqueue(id, stream)
    shift(purpose, nil, 'QUEUED')
  end
end
count('submitted', #fresh)
if queued > 0 then ring('prompts') end
return { 'OK', #fresh, duplicates }
