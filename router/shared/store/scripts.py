"""The Lua scripts that Redis runs: one for each operation, so that it happens whole or not at all.

The state of one ledger, that of a tenant or an organization, is four keys with its name as hash tag, so that they
share a slot of a cluster:

- KEYS[1], a hash: a meter's name to "used at", its level at a stamp (`policies.quota.budget.Meter.level`); for a budget
  also "open/" and its name, to what of that open reservations have taken;
- KEYS[2], a hash: a reservation's id to what it took, as msgpack, or to "" once it is settled;
- KEYS[3], a sorted set: when each id lapses or is forgotten, in Unix milliseconds; for "advance/" and a meter's name,
  when routers have given back at the latest what they hold of it in advance;
- KEYS[4], a hash: a writer's name to the numbers of the debts that it has settled, as "day up-to others...".

ARGV[1] is the time in milliseconds, or "" for Redis' own: then the clocks of the routers do not matter. All numbers are
integers below 2**53, which Lua's doubles hold exactly. Needs Redis 6.2 or any Valkey.
"""

from __future__ import annotations

OPEN = b"open/"
"""What the fields begin with that hold what open reservations have of a budget."""

_PRELUDE = """
local levels, held, due = KEYS[1], KEYS[2], KEYS[3]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
-- the number of the month: days since 1970 to a civil date, after H. Hinnant, "chrono-Compatible Low-Level Date
-- Algorithms"
local function month(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local doe = shifted - era * 146097
  local yoe = math.floor(
    (doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local from_march = math.floor((5 * doy + 2) / 153)
  local year, index = yoe + era * 400, from_march + 2
  if index > 11 then year, index = year + 1, index - 12 end
  return (year - 1970) * 12 + index
end

-- a fixed period has its first day and the day behind its last one in its rate; 99999 is no end
local function is_fixed(rate) return rate < -3 end
local function first_day(rate) return math.floor(-rate / 100000) end
local function end_day(rate) return -rate % 100000 end

-- the present stamp of a meter: milliseconds for a rate; else the number of its day (0), hour (-1), week or month, or
-- the first day of its fixed period
local day = math.floor(now / 86400000)
local function stamp(rate, at)
  at = at or now
  local on = math.floor(at / 86400000)
  if rate > 0 then return at end
  if rate == 0 then return on end
  if rate == -1 then return math.floor(at / 3600000) end
  if rate == -2 then return math.floor((on + 3) / 7) end
  if rate == -3 then return month(on) end
  return first_day(rate)
end

-- does a meter count what begins now, or at a given time? What is taken of one that does not has the stamp UNCOUNTED
local UNCOUNTED = -1
local function holds(rate, at)
  local on = at and math.floor(at / 86400000) or day
  return not is_fixed(rate) or (first_day(rate) <= on and on < end_day(rate))
end

local function whole(number) return string.format('%.0f', number) end

local function stored(used, at) return string.format('%.0f %.0f', used, at) end

-- the level now and its stamp, of what is stored; a rate of 0 or less is a budget. Where the clock ran ahead and was
-- set right, what is stored counts as stored now, and is stored so under its `name`: or it would not drip until then.
local function level(raw, rate, name)
  local present = stamp(rate)
  if not raw then return 0, present end
  local used, at = string.match(raw, '^(%d+) (%d+)$')
  used, at = tonumber(used), tonumber(at)
  if at > present then
    at = present
    if name then redis.call('HSET', levels, name, stored(used, at)) end
  end
  if rate <= 0 then return at < present and 0 or used, math.max(at, present) end
  return math.max(0, used - rate * math.max(0, now - at)), math.max(at, now)
end

-- what is to be stored if a level rises by `amount` that was taken at the stamp `taken_at`
local function moved(raw, rate, amount, taken_at)
  local used, at = level(raw, rate)
  -- a request belongs to the period in which it began
  if rate > 0 or taken_at >= at then used = math.max(0, used + amount) end
  return stored(used, at)
end

-- every `step`-th argument from the `first` on: the names of meters; and what is stored of them
local function meters(first, step)
  local names = {}
  for i = first, #ARGV, step do names[#names + 1] = ARGV[i] end
  if #names == 0 then return names, {} end
  return names, redis.call('HMGET', levels, unpack(names))
end

-- where it is stored what open reservations have of a budget
local function open(name) return 'open/' .. name end

local function opened(names)
  if #names == 0 then return {} end
  local of = {}
  for n, name in ipairs(names) do of[n] = open(name) end
  return redis.call('HMGET', levels, unpack(of))
end

-- one list of both
local function joined(first, second)
  for _, each in ipairs(second) do first[#first + 1] = each end
  return first
end

local function save(fields) if #fields > 0 then redis.call('HSET', levels, unpack(fields)) end end

-- keys stay for 40 days without use; levels also until 40 days behind the end of the fixed periods that were counted
local FORTY_DAYS = 3456000000
local stay_ms = redis.call('PTTL', levels)
local function keep(rates)
  if stay_ms == -2 then stay_ms = 0 end
  for _, rate in ipairs(rates) do
    if is_fixed(rate) and holds(rate) and stay_ms >= 0 then
      local last = end_day(rate)
      stay_ms = last == 99999 and -1 or math.max(stay_ms, last * 86400000 - now + FORTY_DAYS)
    end
  end
  if stay_ms < 0 then
    redis.call('PERSIST', levels)
  else
    redis.call('PEXPIRE', levels, math.max(stay_ms, FORTY_DAYS))
  end
  for i = 2, #KEYS do redis.call('PEXPIRE', KEYS[i], FORTY_DAYS) end
end

-- at most so many at once, so that no call is slow; each call makes at most one that falls due
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', whole(now), 'LIMIT', 0, 32)) do
  local record = redis.call('HGET', held, id)
  if record and record ~= '' then
    for _, part in ipairs(cmsgpack.unpack(record)) do
      local name, rate, amount, at = unpack(part)
      if at ~= UNCOUNTED then
        redis.call('HSET', levels, name, moved(redis.call('HGET', levels, name), rate, -amount, at))
        if rate <= 0 then
          redis.call('HSET', levels, open(name), moved(redis.call('HGET', levels, open(name)), rate, -amount, at))
        end
      end
    end
  end
  redis.call('HDEL', held, id)
  redis.call('ZREM', due, id)
end
"""

RESERVE = (
    _PRELUDE
    + """
-- ARGV: now, id, lease, for how long requests are taken from it that come later (0: it is of one request), then name,
-- rate, capacity, need, amount of each meter; returns {was it granted, now, for how long others may hold in advance
-- what it lacks, the level of each meter, what open reservations have of each}
local id, lapses, advance = ARGV[2], now + tonumber(ARGV[3]), tonumber(ARGV[4])
local record = redis.call('HGET', held, id)
local names, raw = meters(5, 5)
local held_raw, granted, found, reserved, parts, taken, all = opened(names), 1, {}, {}, {}, {}, {}
local advanced = 0
for n, name in ipairs(names) do
  local i = 5 * n + 1
  local rate, capacity = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  local need, amount = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local used, at = level(raw[n], rate, name)
  reserved[n] = rate <= 0 and level(held_raw[n], rate, open(name)) or 0
  if not record then
    if not holds(rate) then
      amount, at = 0, UNCOUNTED
    elseif used + need > capacity then
      granted = 0
      local until_ms = redis.call('ZSCORE', due, 'advance/' .. name)
      if until_ms then advanced = math.max(advanced, tonumber(until_ms) - now) end
    end
    if at ~= UNCOUNTED then
      taken[#taken + 1] = name
      taken[#taken + 1] = stored(used + amount, at)
      if rate <= 0 then
        taken[#taken + 1] = open(name)
        taken[#taken + 1] = stored(reserved[n] + amount, at)
      end
    end
    parts[n] = {name, rate, amount, at}
  end
  found[n], all[n] = used, rate
end
-- users come and go: at each call that names one, a few that have nothing taken are forgotten
local rates = {}
for n, name in ipairs(names) do
  local of = string.match(name, '^[%w/%%._-]*~')
  if of then rates[of], rates[open(of)] = tonumber(ARGV[5 * n + 1]), tonumber(ARGV[5 * n + 1]) end
end
if next(rates) then
  for _, name in ipairs(redis.call('HRANDFIELD', levels, 4)) do
    local rate = rates[string.match(name, '^[%w/%%._-]*~') or '']
    local is_over = rate and is_fixed(rate) and day >= end_day(rate)
    if is_over or rate and level(redis.call('HGET', levels, name), rate) == 0 then redis.call('HDEL', levels, name) end
  end
end
if granted == 1 and record ~= '' then
  if not record then
    for n, part in ipairs(parts) do
      found[n] = found[n] + part[3]
      if part[2] <= 0 then reserved[n] = reserved[n] + part[3] end
    end
    save(taken)
    redis.call('HSET', held, id, cmsgpack.pack(parts))
    if advance > 0 then
      for _, name in ipairs(names) do redis.call('ZADD', due, 'GT', whole(now + advance), 'advance/' .. name) end
    end
  end
  redis.call('ZADD', due, whole(lapses), id)
  keep(all)
end
return joined(joined({granted, now, advanced}, found), reserved)
"""
)

SETTLE = (
    _PRELUDE
    + """
-- ARGV: now, id, how long to remember it, its writer and its number there, when it began (0: now), then name, rate,
-- amount of each meter; returns 0 again, 1 settled, 2 late
local id, forgotten = ARGV[2], now + tonumber(ARGV[3])
local writers, writer, number, began = KEYS[4], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if began == 0 or began > now then began = now end
local record = redis.call('HGET', held, id)
if record == '' then return 0 end

-- ids are soon forgotten, and an outage may last: the numbers of a writer tell for eight days what has come before.
-- They come nearly in order, so that few stand apart from the rest
local FURTHER, DAYS = 64, 8
local seen, further = redis.call('HGET', writers, writer), {}
local up_to = 0
if seen then
  for found in string.gmatch(seen, '%d+') do further[#further + 1] = tonumber(found) end
  table.remove(further, 1)
  up_to = table.remove(further, 1)
end
if number <= up_to then return 0 end
for _, found in ipairs(further) do if found == number then return 0 end end
further[#further + 1] = number
table.sort(further)
while #further > FURTHER or further[1] == up_to + 1 do up_to = table.remove(further, 1) end
table.insert(further, 1, up_to)
for n, found in ipairs(further) do further[n] = whole(found) end
redis.call('HSET', writers, writer, day .. ' ' .. table.concat(further, ' '))
if not seen then
  for _, other in ipairs(redis.call('HRANDFIELD', writers, 4)) do
    local last = tonumber(string.match(redis.call('HGET', writers, other), '^%d+'))
    if last < day - DAYS then redis.call('HDEL', writers, other) end
  end
end

local parts = record and cmsgpack.unpack(record) or {}
local names, raw = meters(7, 3)
local held_raw, settled, all = opened(names), {}, {}
for n, name in ipairs(names) do
  local rate, amount, part = tonumber(ARGV[3 * n + 5]), tonumber(ARGV[3 * n + 6]), parts[n]
  local at = part and part[4] or holds(rate, began) and stamp(rate, began) or UNCOUNTED
  -- of what was let in without us, a rate has forgotten what is older than a minute, and paid off by now
  if not record and rate > 0 and now - began >= 60000 and amount <= rate * (now - began) then at = UNCOUNTED end
  if at ~= UNCOUNTED then
    settled[#settled + 1] = name
    settled[#settled + 1] = moved(raw[n], rate, amount - (part and part[3] or 0), at)
    if part and rate <= 0 then
      settled[#settled + 1] = open(name)
      settled[#settled + 1] = moved(held_raw[n], rate, -part[3], at)
    end
  end
  all[n] = rate
end
save(settled)
redis.call('HSET', held, id, '')
redis.call('ZADD', due, whole(forgotten), id)
keep(all)
return record and 1 or 2
"""
)

RENEW = (
    _PRELUDE
    + """
-- ARGV: now, lease, then ids; returns how many of them are open
local lapses, renewed = whole(now + tonumber(ARGV[2])), 0
for i = 3, #ARGV do
  local record = redis.call('HGET', held, ARGV[i])
  if record and record ~= '' then
    redis.call('ZADD', due, 'XX', lapses, ARGV[i])
    renewed = renewed + 1
  end
end
keep({})
return renewed
"""
)

STANDING = (
    _PRELUDE
    + """
-- ARGV: now, then name, rate of each meter; returns {now, the level of each, what open reservations have of each}
local names, raw = meters(2, 2)
local held_raw, found, reserved = opened(names), {}, {}
for n, name in ipairs(names) do
  local rate = tonumber(ARGV[2 * n + 1])
  found[n] = level(raw[n], rate, name)
  reserved[n] = rate <= 0 and level(held_raw[n], rate, open(name)) or 0
end
return joined(joined({now}, found), reserved)
"""
)
