-- OpenSession, for a trainer that does not settle its ledger: what it names as trained since the last commit but one is
-- COMMITTED. ARGV: session epoch, instance ids. Returns OK, number of instances that were in another state.
local refusal = refuse(ARGV[1], true)
if refusal then return refusal end
local at, found = now(), 0
for n = 2, #ARGV do
  if settle_trained(ARGV[n], nil, at) then found = found + 1 end
end
if found > 0 then
  call('HDEL', RUN, 'ledger') -- their steps are unknown
  notify('prompts')
end
return { 'OK', found }
