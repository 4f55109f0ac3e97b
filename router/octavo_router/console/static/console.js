// The page's life: the router's stream of events in, the chat out. Nothing is kept but the API key,
// and that only until the tab is closed.

import { drawDeployments, drawEngines, drawRequests, drawTiles, drawWhy, element } from "./draw.js";

const $ = (id) => document.getElementById(id);
const MAX_KEPT = 200;
const WINDOW = 5; // seconds over which rates are taken

const history = []; // of totals, oldest first
let requests = [];
let conversation = [];
let answering = null; // an AbortController while an answer comes
let mayExplain = true; // until the router says that only its administrators may look inside

function headers(more = {}) {
  const key = sessionStorage.getItem("octavo-key");
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

// ── the router's events ──

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    for (let at; (at = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(at + 2)) {
      const data = buffer.slice(0, at).split("\n").filter((line) => line.startsWith("data: "));
      if (data.length > 0) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

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
      requests = []; // a new stream tells them all again
      for await (const data of events(response)) show(JSON.parse(data));
      state("off", "the router has ended the stream; looking again");
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
  drawTiles($("tiles"), rates(now), now);
  drawEngines($("engines"), now.endpoints);
  drawDeployments($("deployments-section"), $("deployments"), now.deployments);
  drawRequests($("requests"), requests, now.at);
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

function showModels(models) {
  const select = $("model");
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === models.join("\n")) return; // do not close an open list
  const chosen = select.value;
  select.replaceChildren(...models.map((name) => new Option(name, name, false, name === chosen)));
}

// ── the chat ──

function body(text) {
  return JSON.stringify({
    model: $("model").value,
    messages: [...conversation, { role: "user", content: text }],
    max_tokens: Number($("max-tokens").value) || 256,
    stream: true,
  });
}

async function ask(text) {
  const sent = { "content-type": "application/json" };
  if (mayExplain) sent["x-octavo-explain"] = "1";
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(sent), body: body(text), signal: answering.signal,
  });
  if (response.status !== 403 || !mayExplain) return response;
  const { error } = await response.clone().json();
  if (error?.code !== "admin_key_required") return response;
  mayExplain = false;
  return ask(text);
}

async function send(text) {
  answering = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("told").textContent = "";
  const messages = $("messages");
  messages.append(element("p", text, "user"));
  const answer = messages.appendChild(element("p", ""));
  const began = performance.now();
  let first = null;
  let pieces = 0;
  try {
    const response = await ask(text);
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    const why = response.headers.get("x-octavo-explain");
    if (why) drawWhy($("why"), JSON.parse(why));
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta;
      const piece = delta?.content ?? delta?.reasoning ?? "";
      if (!piece) continue;
      first ??= performance.now();
      pieces += 1;
      answer.append(piece);
      messages.scrollTop = messages.scrollHeight;
    }
    conversation.push({ role: "user", content: text }, { role: "assistant", content: answer.textContent });
  } catch (error) {
    if (error.name === "AbortError") {
      answer.append(" [stopped]");
    } else {
      messages.append(element("p", error.message, "error"));
    }
  } finally {
    answering = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    if (first !== null) {
      const rate = pieces > 1 ? ((pieces - 1) * 1000) / (performance.now() - first) : 0;
      $("told").textContent = `first token after ${Math.round(first - began)} ms, then ${rate.toFixed(0)} pieces/s`;
    }
  }
}

async function explain() {
  const text = $("prompt").value.trim() || "Hello";
  const response = await fetch("debug/route?path=/v1/chat/completions", {
    method: "POST", headers: headers({ "content-type": "application/json" }), body: body(text),
  });
  const answer = await response.json();
  if (response.ok) {
    drawWhy($("why"), answer);
    $("told").textContent = "nothing was sent";
  } else {
    $("told").textContent = response.status === 404
      ? "this needs a router with --debug-endpoints; a message that is sent is explained always"
      : answer.error?.message ?? response.statusText;
  }
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || answering) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => answering?.abort());
$("explain").addEventListener("click", explain);
$("clear").addEventListener("click", () => {
  answering?.abort();
  conversation = [];
  $("messages").replaceChildren();
  $("why").hidden = true;
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("octavo-key", $("key").value.trim());
  $("key").value = "";
  follow();
});
follow();
