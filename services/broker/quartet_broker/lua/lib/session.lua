-- Guards and helpers of the trainer's session.

-- nil if the session is the run's newest, else the refusal to return.
local function refuse(session)
  even_when_full()
  if not run_state() then return { 'NOT_FOUND' } end
  local newest = call('HGET', RUN, 'session')
  if newest ~= session then return { 'FENCED', newest } end
end

-- The first step that has no batch yet.
local function next_step()
  local first = number('policy_version')
  for _, step in ipairs(call('HKEYS', BATCHES)) do first = math.max(first, tonumber(step) + 1) end
  return first
end
