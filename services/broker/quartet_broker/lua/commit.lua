-- Commit: TRAINED -> COMMITTED for the steps below `step`, a bounded number of steps a call.
-- ARGV: session epoch, step. Returns OK, groups committed by this call, "1" if steps are left.
local refusal = refuse(ARGV[1])
if refusal then return refusal end
local target = tonumber(ARGV[2])
local version, committed = number('policy_version'), number('committed_step')
if target > version then return { 'OUT_OF_ORDER', version } end
local at, groups, settled, left = now(), 0, 0, false
for _, step in ipairs(call('HKEYS', BATCHES)) do
  if tonumber(step) < target then
    left = settled >= 2000
    if left then break end
    local ids = call('LRANGE', batch(step), 0, -1)
    -- What is left of a batch that was not trained as it stands here: a Redis that lost the end of its log has forgotten
    -- that the trainer dropped it. What the trainer did train of it is settled by now (settle_consumed).
    local trained = state_in(step) == 'TRAINED'
    settle(ids, trained and 'COMMITTED' or 'DROPPED', at, state_in(step))
    count(trained and 'committed' or 'dropped', #ids)
    call('UNLINK', batch(step))
    call('HDEL', BATCHES, step)
    call('HDEL', BATCH_BYTES, step)
    settled = settled + #ids
    if trained then groups = groups + #ids end
  end
end
if not left and target > committed then call('HSET', RUN, 'committed_step', target) end
return { 'OK', groups, left and 1 or 0 }
