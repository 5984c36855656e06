-- KEYS: records. ARGV: sets by expiry. Answers the time, each record, and how many live ones each set has.
local answer = { now }
for _, key in ipairs(KEYS) do
    answer[#answer + 1] = redis.call('GET', key)
end
for _, index in ipairs(ARGV) do
    answer[#answer + 1] = live(index)
end
return answer
