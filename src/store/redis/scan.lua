-- ARGV: prefix, table's letter, beginning of the keys. Answers key, value, key, value, ...
local answer = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', ARGV[1] .. '#' .. ARGV[2], '(' .. now, '+inf')) do
    local _, key = size_and_key(member)
    if string.sub(key, 1, #ARGV[3]) == ARGV[3] then
        local value = redis.call('GET', ARGV[1] .. ARGV[2] .. ':' .. key)
        if value then
            answer[#answer + 1] = key
            answer[#answer + 1] = value
        end
    end
end
return answer
