-- ARGV: prefix, table's letter. Answers how many live records and how many bytes it has.
sweep(ARGV[1], ARGV[2], 1000)
return { live(ARGV[1] .. '#' .. ARGV[2]), tonumber(redis.call('GET', ARGV[1] .. '=' .. ARGV[2]) or 0) }
