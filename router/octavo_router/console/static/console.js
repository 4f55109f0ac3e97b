// The page's life: the router's stream of events in, the chat out.

import { events, headers, plainPost, request, setKey, showModels, startChat } from "./chat.js";
import { drawDeployments, drawEngines, drawRequests, drawTiles, drawWhy } from "./draw.js";

const $ = (id) => document.getElementById(id);
const MAX_KEPT = 200;
const WINDOW = 5; // seconds over which rates are taken

const history = []; // of totals, oldest first
let requests = [];
let names = new Map(); // of engines by their URLs
let mayExplain = true; // until the router says that only its administrators may look inside

// ── the router's events ──

async function follow() {
  for (;;) {
    try {
      const response = await fetch("octavo/v1/console", { headers: headers() });
      if (response.status === 401) {
        state("off", "an API key is needed");
        $("key-form").hidden = false;
        $("key").focus();
        return;
      }
      if (!response.ok) throw new Error(`the router answered ${response.status}`);
      $("key-form").hidden = true;
      requests = []; // a new stream brings all of them again
      for await (const data of events(response)) show(JSON.parse(data));
      state("off", "the router ended the stream; connecting again");
    } catch (error) {
      state("off", `offline: ${error.message}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function state(value, text) {
  if ($("link").textContent === text) return; // or a screen reader says it every second
  $("link").dataset.state = value;
  $("link").textContent = text;
}

function show(now) {
  state("on", "live");
  $("where").textContent = `${now.version} on ${now.replica}`;
  for (const each of now.requests) requests.push({ ...each, ended_at: now.at - each.age_s });
  requests = requests.slice(-MAX_KEPT);
  names = new Map(now.endpoints.map((each) => [each.url, each.name]));
  drawTiles($("tiles"), rates(now), now);
  drawEngines($("engines"), now.endpoints);
  drawDeployments($("deployments-section"), $("deployments"), now.deployments);
  drawRequests($("requests"), requests, now);
  $("no-requests").hidden = requests.length > 0;
  showModels(now.models);
}

function rates(now) {
  const tokens = now.tokens;
  history.push({ at: now.at, requests: now.num_requests, prompt: tokens.prompt ?? 0,
    cached: tokens.cached ?? 0, output: tokens.output ?? tokens.completion ?? 0 });
  while (history.length > 2 && history[0].at < now.at - WINDOW) history.shift();
  const [first, last] = [history[0], history[history.length - 1]];
  const passed = Math.max(1e-3, last.at - first.at);
  const rate = (name) => (history.length < 2 || last[name] < first[name] ? 0 : (last[name] - first[name]) / passed);
  return { requests: rate("requests"), prompt: rate("prompt"), cached: rate("cached"), output: rate("output") };
}

// ── the chat ──

// Asks why the engine was chosen, too, where the router explains it to this client.
async function post(fields, signal) {
  const response = await plainPost(fields, signal, mayExplain ? { "x-octavo-explain": "1" } : {});
  const why = response.headers.get("x-octavo-explain");
  if (why) drawWhy($("why-section"), $("why"), JSON.parse(why), names);
  if (response.status !== 403 || !mayExplain) return response;
  const { error } = await response.clone().json();
  if (error?.code !== "admin_key_required") return response;
  mayExplain = false;
  return post(fields, signal);
}

async function explain() {
  const response = await fetch("debug/route?path=/v1/chat/completions", {
    method: "POST", headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(request($("prompt").value.trim() || "Hello")),
  });
  const answer = await response.json();
  if (response.ok) {
    drawWhy($("why-section"), $("why"), answer, names);
    $("speed").textContent = "nothing was sent";
  } else {
    $("speed").textContent = response.status === 404
      ? "this needs a router with --debug-endpoints; a message that is sent is always explained"
      : answer.error?.message ?? response.statusText;
  }
}

$("explain").addEventListener("click", explain);
$("clear").addEventListener("click", () => { $("why-section").hidden = true; });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  follow();
});
startChat(post);
follow();
