-- Guards and helpers of the trainer's session.

-- nil if the session is the run's newest, else the refusal to return.
local function refuse(session)
  even_when_full()
  if not run_state() then return { 'NOT_FOUND' } end
  local newest = call('HGET', RUN, 'session')
  if newest ~= session or newest == '0' then return { 'FENCED', newest } end -- 0: none was opened yet
end

-- The first step that has no batch yet.
local function next_step()
  local first = number('policy_version')
  for _, step in ipairs(call('HKEYS', BATCHES)) do first = math.max(first, tonumber(step) + 1) end
  return first
end

-- LEASED_TO_TRAINER <-> TRAINED, a whole batch.
local function move_batch(step, from, to)
  call('HSET', BATCHES, step, to == 'TRAINED' and 'TRAINED' or 'GRANTED')
  shift('TRAIN', from, to, tonumber(call('HGET', BATCH_BYTES, step)), call('LLEN', batch(step)))
end

-- The state of a group in a batch.
local function state_in(step) return call('HGET', BATCHES, step) == 'TRAINED' and 'TRAINED' or 'LEASED_TO_TRAINER' end

-- Takes a group out of its step's batch, which is then SHORT, unless it was trained as it was.
local function take_out(id, step)
  call('LREM', batch(step), 0, id)
  call('HINCRBY', BATCH_BYTES, step, -call('HGET', instance(id), 'bytes'))
  if call('HGET', BATCHES, step) ~= 'TRAINED' then call('HSET', BATCHES, step, 'SHORT') end
end
