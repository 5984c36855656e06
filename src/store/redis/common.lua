-- Before each script. A member of a sorted set is "SIZE KEY".
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))

local function size_and_key(member)
    local size, key = string.match(member, '^(%d+) (.*)$')
    return size or 0, key or ''
end

local function forget(prefix, letter, member)
    if redis.call('ZREM', prefix .. '#' .. letter, member) == 1 then
        redis.call('DECRBY', prefix .. '=' .. letter, (size_and_key(member)))
    end
    if letter == 'r' then
        redis.call('ZREM', prefix .. '@r', member)
    end
end

-- The server drops expired records by itself; this takes them off the books, some at a time. Until then a key may have
-- a member for what has expired and one for what was put since.
local function sweep(prefix, letter, most)
    local expired = redis.call('ZRANGEBYSCORE', prefix .. '#' .. letter, '-inf', now, 'LIMIT', 0, most)
    for _, member in ipairs(expired) do
        forget(prefix, letter, member)
    end
end

local function live(index)
    return redis.call('ZCOUNT', index, '(' .. now, '+inf')
end
