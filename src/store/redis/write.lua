-- KEYS: records. ARGV: prefix, most bytes of results, then for each record: table's letter, version it had, member it
-- had, what to do, new value, expiry, new member, most records of its table. An empty text is none.
-- Answers 1: written; 0: a record is not as it was, or there is no room any more, and nothing was written.
local prefix, most_bytes = ARGV[1], tonumber(ARGV[2])

local function record(i)
    local at = 2 + (i - 1) * 8
    return {
        letter = ARGV[at + 1], version = ARGV[at + 2], had = ARGV[at + 3], action = ARGV[at + 4],
        value = ARGV[at + 5], expires = ARGV[at + 6], member = ARGV[at + 7], most = ARGV[at + 8],
    }
end

local new, most = {}, {}
for i, key in ipairs(KEYS) do
    local is = record(i)
    if redis.call('GETRANGE', key, 0, 7) ~= is.version then
        return 0
    end
    if is.action == 'put' and is.version == '' and is.most ~= '' then
        new[is.letter] = (new[is.letter] or 0) + 1
        most[is.letter] = tonumber(is.most)
    end
end
for letter, count in pairs(new) do
    sweep(prefix, letter, 100)
    if live(prefix .. '#' .. letter) + count > most[letter] then
        return 0
    end
end

for i, key in ipairs(KEYS) do
    local is = record(i)
    if is.action ~= 'keep' and is.had ~= '' then
        forget(prefix, is.letter, is.had)
    end
    if is.action == 'delete' then
        redis.call('DEL', key)
    elseif is.action == 'put' then
        if is.expires == '' then
            redis.call('SET', key, is.value)
        else
            -- The server takes a record as expired only after its time, the store from that time on.
            redis.call('SET', key, is.value, 'PXAT', string.format('%.0f', tonumber(is.expires) - 1))
        end
        local expires = is.expires == '' and '+inf' or is.expires
        -- One that has expired may still be there under the same member.
        if redis.call('ZADD', prefix .. '#' .. is.letter, expires, is.member) == 1 then
            redis.call('INCRBY', prefix .. '=' .. is.letter, (size_and_key(is.member)))
        end
        if is.letter == 'r' then
            redis.call('ZADD', prefix .. '@r', redis.call('INCR', prefix .. '!r'), is.member)
        end
    end
end

if tonumber(redis.call('GET', prefix .. '=r') or 0) > most_bytes then
    sweep(prefix, 'r', 100)
end
while tonumber(redis.call('GET', prefix .. '=r') or 0) > most_bytes do
    local oldest = redis.call('ZRANGE', prefix .. '@r', 0, 0)[1]
    if not oldest then
        break
    end
    local _, key = size_and_key(oldest)
    local expires = redis.call('ZSCORE', prefix .. '#r', oldest)
    forget(prefix, 'r', oldest)
    -- Of what has expired there may be a newer record under the key.
    if expires and tonumber(expires) > tonumber(now) then
        redis.call('DEL', prefix .. 'r:' .. key)
    end
end
return 1
