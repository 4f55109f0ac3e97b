-- What wrk sends: chat completions of about 1.3 KB, one of GROUPS system prompts (each different from
-- its first words on) and a question of its own. Prints one JSON line at the end.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

local groups = tonumber(os.getenv("GROUPS") or "64")
local rule = "Answer in one short paragraph and name the page of the manual you used. "
local systems = {}
for group = 0, groups - 1 do
  systems[group] = string.format("Desk %04d. ", group) .. string.rep(rule, 16)
end

local count = 0
request = function()
  count = count + 1
  -- A step that shares no factor with the groups: neighbours in time are of different groups.
  local group = (count * 7919) % groups
  return wrk.format("POST", "/v1/chat/completions", nil, string.format(
    '{"model":"m","messages":[{"role":"system","content":"%s"},' ..
    '{"role":"user","content":"Question %d: how do I reset the counter?"}],"max_tokens":16}',
    systems[group], count % 1000))
end

done = function(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'JSON {"requests":%d,"req_s":%.1f,"p50_ms":%.3f,"p99_ms":%.3f,"bad":%d}\n',
    summary.requests, summary.requests / (summary.duration / 1e6), latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
