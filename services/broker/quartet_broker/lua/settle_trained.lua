-- SettleTrained: commits the first step that is not committed, with the batch that the checkpoint's ledger has for it.
-- ARGV: session epoch, step, instance ids. Returns OK, steps settled, number of instances that were in another state; or
-- GAP, steps settled; or BEYOND, steps of the checkpoint.
local refusal = refuse(ARGV[1], true)
if refusal then return refusal end
local step, committed, checkpoint = ARGV[2], number('committed_step'), number('settle_to') or 0
if tonumber(step) < committed then return { 'OK', committed, 0 } end
if tonumber(step) > committed then return { 'GAP', committed } end
if committed >= checkpoint then return { 'BEYOND', checkpoint } end
local at, found, ids = now(), 0, {}
for n = 3, #ARGV do
  if settle_trained(ARGV[n], step, at) then found = found + 1 end
  table.insert(ids, ARGV[n])
end
requeue_batch(step)
advance(step, ids)
notify('prompts')
return { 'OK', committed + 1, found }
