-- The curriculum (RunSpec.curriculum): training prompts that are solved or hopeless are DROPPED instead of leased.
--
-- The hash q:{run}:solves has, by unit, the mean accuracies of its last groups, oldest first: "0.5 0.875". A unit is a
-- problem or a source, the field `unit` of an instance. The hash q:{run}:sources has, by source, fields "COUNT NAME".
local SOLVES, SOURCES = P .. 'solves', P .. 'sources'
local MOST_SKIPPED = 500 -- prompts that one call drops
local OF_SOURCE = 50 -- groups over which a source's accuracy is averaged, about

-- The unit of an instance in a run whose curriculum is `by` PROMPT, SOURCE or false; nil: it is not followed.
local function unit_of(by, source, prompt_id)
  if by == 'SOURCE' then return source end
  return by and prompt_id ~= '' and source .. '\n' .. prompt_id or nil
end

local function of_source(count, source, by)
  if source then call('HINCRBY', SOURCES, count .. ' ' .. source, by) end
end

-- Keeps the mean accuracy of a group that was put; an instance that is generated again counts once.
local function keep_accuracy(id, accuracy)
  local source, unit, counted = unpack(call('HMGET', instance(id), 'source', 'unit', 'counted'))
  if counted or not (source or unit) then return end
  call('HSET', instance(id), 'counted', 1)
  if unit then
    local kept = {}
    for one in string.gmatch(call('HGET', SOLVES, unit) or '', '%S+') do table.insert(kept, one) end
    table.insert(kept, accuracy)
    call('HSET', SOLVES, unit, table.concat(kept, ' ', math.max(1, #kept - number('curriculum_window') + 1)))
  end
  if source then
    local groups = call('HINCRBY', SOURCES, 'groups ' .. source, 1)
    local mean = tonumber(call('HGET', SOURCES, 'accuracy ' .. source) or 0)
    mean = mean + (accuracy - mean) / math.min(groups, OF_SOURCE)
    call('HSET', SOURCES, 'accuracy ' .. source, string.format('%.9g', mean))
  end
end

-- Drops the prompts at the head of prompts:train that are solved or hopeless, until `n` that are not come first. Returns
-- how many of them may be leased. `after`: the last ticket that was delivered.
local function skip_prompts(n, after, at)
  local window, above, below, floor = unpack(
    call('HMGET', RUN, 'curriculum_window', 'solved_above', 'hopeless_below', 'floor'))
  if not window then return n end
  window, above, below, floor = tonumber(window), tonumber(above), tonumber(below), tonumber(floor)
  local solved, hopeless, tickets, kept = {}, {}, {}, 0

  -- The list that a prompt belongs to; nil: it is used.
  local function verdict(id, unit)
    local known, total, groups = unit and call('HGET', SOLVES, unit) or '', 0, 0
    for one in string.gmatch(known, '%S+') do total, groups = total + one, groups + 1 end
    if groups < window or tonumber(string.sub(redis.sha1hex(id), 1, 8), 16) < floor * 4294967296 then return end
    return total / groups > above and solved or total / groups < below and hopeless or nil
  end

  while kept < n and #tickets < MOST_SKIPPED do
    local entries = call('XRANGE', P .. 'prompts:train', '(' .. after, '+', 'COUNT', MOST_SKIPPED)
    for _, entry in ipairs(entries) do
      if kept == n or #tickets == MOST_SKIPPED then break end
      local id = entry[2][2]
      local unit, source = unpack(call('HMGET', instance(id), 'unit', 'source'))
      local list = verdict(id, unit)
      after = entry[1]
      if list then
        table.insert(list, id)
        table.insert(tickets, after)
        of_source(list == solved and 'solved' or 'hopeless', source, 1)
      else
        kept = kept + 1
      end
    end
    if #entries < MOST_SKIPPED then break end
  end

  remove_tickets('prompts:train', tickets)
  local groups = ' over its last ' .. window .. ' groups'
  settle(solved, 'DROPPED', at, nil, 'the curriculum skips it: accuracy above ' .. above .. groups)
  settle(hopeless, 'DROPPED', at, nil, 'the curriculum skips it: accuracy below ' .. below .. groups)
  count('dropped', #tickets)
  count('skipped', #tickets)
  notify_results(solved)
  notify_results(hopeless)
  if #tickets == MOST_SKIPPED then notify('prompts') end -- there may be more: whoever waits asks again
  if #tickets > 0 and prompts_are_over() then notify('experience') end
  return kept
end
