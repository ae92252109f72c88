-- SubmitPrompts: (nothing) -> QUEUED, or STORED for an evaluation set. All or nothing.
-- ARGV: set name or "", instance that was submitted before these or "", maximum prompts of a set, "ask" for a dry run or
-- "", then of each the id, digest, purpose, pinned version or "", data pass, prompt (for a dry run its size), source or "",
-- and prompt id or "".
local state = run_state()
if not state then return { 'NOT_FOUND' } end
if state ~= 'ACTIVE' then return { 'FINISHED', state } end

if is_forgotten(ARGV[2]) then return { 'FORGOTTEN' } end

local FIRST, FIELDS, ASKED = 5, 8, ARGV[4] == 'ask'
local first_pass, newest_pass = number('first_pass'), number('newest_pass')
local ids = {}
for at = FIRST, #ARGV, FIELDS do table.insert(ids, ARGV[at]) end
local settled = call('HMGET', SETTLED, unpack(ids))
local fresh, queued, trained, duplicates, bytes = {}, 0, 0, 0, 0
for n, id in ipairs(ids) do
  local at = FIRST + (n - 1) * FIELDS
  local digest, purpose, pass = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 4])
  local known = call('HGET', instance(id), 'digest')
  if not known then known = settled[n] and string.match(settled[n], '^%u+|([^|]*)|') end
  if not known and purpose == 'TRAIN' and pass < first_pass then known = '' end -- its pass is over
  if not known then
    table.insert(fresh, at)
    bytes = bytes + size_of(ASKED and tonumber(ARGV[at + 5]) or #ARGV[at + 5])
    if purpose ~= 'EVALUATE' then queued = queued + 1 end
    if purpose == 'TRAIN' then trained = trained + 1 end
  elseif known ~= digest and known ~= '' then -- '': its content is unknown; see settle_trained
    return { 'CONFLICT', id }
  else
    duplicates = duplicates + 1
  end
end
if trained > 0 and call('HGET', RUN, 'prompts_ended') == '1' then return { 'ENDED' } end
local kept = prompts_overflow(bytes, 1)
if kept then return { 'OVERFLOW', kept, number('max_prompt_bytes') } end
local guest = guest_of_the_run()
local refusal = guest ~= '' and
  (over_share('prompts', #fresh, number('max_queued_prompts')) or over_share('bytes', bytes, number('max_prompt_bytes')))
if refusal then return refusal end
if #fresh > queued then
  local stored = call('LLEN', P .. 'set:' .. ARGV[1])
  if stored + #fresh - queued > tonumber(ARGV[3]) then return { 'SET_FULL', stored } end
end
-- Serving prompts keep their tickets, and so their place in the queue, until they are answered.
local limit, waiting = number('max_queued_prompts'), gauge('queued') + call('XLEN', P .. 'prompts:serve')
if queued > limit then return { 'TOO_MANY', limit } end
if queued > 0 and waiting + queued > limit then return { 'FULL', waiting, limit } end
if ASKED then return { 'OK', #fresh, duplicates } end

-- Adds content and data pass to the settled lines of instances that only a ledger has named so far.
for n, id in ipairs(ids) do
  local attempt, step = string.match(settled[n] or '', '^COMMITTED||(%d+)|(%-?%d+)|$')
  if attempt then
    local at = FIRST + (n - 1) * FIELDS
    local known = { 'COMMITTED', ARGV[at + 1], attempt, step, ARGV[at + 4] }
    call('HSET', SETTLED, id, table.concat(known, '|'))
  end
end
local born, by = moment('S', now()), call('HGET', RUN, 'curriculum_by')
for _, at in ipairs(fresh) do
  local id, digest, purpose, pinned, pass, prompt, source, prompt_id = unpack(ARGV, at, at + FIELDS - 1)
  call('HSET', instance(id), 'digest', digest, 'purpose', purpose, 'prompt', prompt, 'attempt', 0, 'state', 'STORED',
    'life', born, 'size', size_of(#prompt), 'by', guest)
  if purpose == 'EVALUATE' then
    call('RPUSH', P .. 'set:' .. ARGV[1], id)
  else
    local stream = 'prompts:train'
    if purpose == 'TRAIN' then
      call('HSET', instance(id), 'pass', pass)
      if source ~= '' then call('HSET', instance(id), 'source', source) end
      local unit = unit_of(by, source, prompt_id)
      if unit then call('HSET', instance(id), 'unit', unit) end
      live(pass, 1)
      newest_pass = math.max(newest_pass, tonumber(pass))
    else
      if pinned ~= '' then call('HSET', instance(id), 'pinned', pinned) end
      stream = pinned ~= '' and 'prompts:pin:' .. pinned or 'prompts:serve'
    end
    enqueue(id, stream)
    shift(purpose, nil, 'QUEUED')
  end
end
if trained > 0 then call('HSET', RUN, 'newest_pass', newest_pass) end
count('submitted', #fresh)
count('prompt_bytes', bytes)
hold('prompts', guest, #fresh)
hold('bytes', guest, bytes)
if queued > 0 then notify('prompts') end
return { 'OK', #fresh, duplicates }
