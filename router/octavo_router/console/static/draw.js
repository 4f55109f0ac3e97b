// What the page shows, drawn from one event of the router. Text is always set as text.

import { element } from "./markdown.js";

const TILES = [
  ["Requests/s", (rates) => number(rates.requests)],
  ["Answer tokens/s", (rates) => number(rates.output)],
  ["Prompt tokens/s", (rates) => number(rates.prompt)],
  ["Found in cache", (rates) => (rates.prompt > 0 ? percent(rates.cached / rates.prompt) : "–")],
  ["In flight", (_, now) => sum(now.pools, "in_flight")],
  ["Queued", (_, now) => sum(now.pools, "queued") + sum(now.pools, "held")],
  ["Engines ready", (_, now) => `${sum(now.pools, "ready")} of ${sum(now.pools, "engines")}`],
];
const COLOURS = { ready: "good", connecting: "warn", draining: "warn", ejected: "bad", down: "bad" };
const MAX_ROWS = 60;

export function drawTiles(list, rates, now) {
  list.replaceChildren(...TILES.map(([name, value]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value(rates, now)));
    return tile;
  }));
}

export function drawEngines(body, endpoints) {
  if (endpoints.length === 0) {
    body.replaceChildren(line([[`No engine is known to this router yet.`]], 7));
    return;
  }
  body.replaceChildren(...endpoints.map((each) => {
    const state = element("span", each.state, `state ${COLOURS[each.state] ?? ""}`);
    if (each.reason) state.title = each.reason;
    const said = element("td", undefined, each.reason ? "why" : "");
    said.append(state);
    if (each.reason) said.append(` ${each.reason}`);
    const usage = each.loading ?? each.kv_usage;
    const kv = element("td");
    if (usage !== null) kv.append(meter(usage, each.loading === null ? "KV cache in use" : "loaded"));
    const row = line([[each.name, "id"]]);
    row.firstChild.append(element("span", each.revision ? `${each.pool} · ${each.revision}` : each.pool, "under"));
    row.firstChild.title = each.url;
    row.append(said, kv);
    for (const value of [each.running, each.waiting, each.in_flight, each.prefixes]) {
      row.append(element("td", value ?? "–", "num"));
    }
    return row;
  }));
}

export function drawDeployments(section, body, deployments) {
  section.hidden = deployments === null;
  if (deployments === null) return;
  body.replaceChildren(...deployments.map((each) => {
    const ready = element("td");
    const colour = each.ready === "True" ? "good" : each.ready === "False" ? "bad" : "warn";
    ready.append(element("span", each.reason || each.ready || "unknown", `state ${colour}`));
    const percentText = each.percent === null ? "" : ` (${Math.round(each.percent)} %)`;
    const row = line([[`${each.namespace}/${each.name}`, "id"]]);
    row.append(ready, element("td", `${each.ready_replicas} of ${each.replicas}`),
      element("td", (each.message || each.phase) + percentText, "why"));
    return row;
  }));
}

// Newest first; the longest of those shown fills the bar. `names`: of engines by host and port.
export function drawRequests(body, requests, now, names) {
  const shown = requests.slice(-MAX_ROWS).reverse();
  const longest = Math.max(1e-6, ...shown.map((each) => each.duration_s));
  body.replaceChildren(...shown.map((each) => {
    const colour = each.status === 200 ? "good" : each.status >= 500 ? "bad" : "warn";
    const status = element("td");
    const said = each.status === 0 ? "left" : each.status;
    status.append(element("span", said, `state ${colour}`));
    if (each.code || (each.outcome !== "ok" && each.outcome)) status.append(` ${each.code || each.outcome}`);
    if (each.resumes) status.append(` resumed ${each.resumes}×`);
    else if (each.attempts > 1) status.append(` ${each.attempts} attempts`);
    const row = line([[ago(now - each.ended_at)], [each.model || "none given"],
      [names.get(each.endpoint) || each.endpoint || "–", "id"]]);
    row.children[1].title = each.route;
    row.children[2].title = each.endpoint;
    const time = element("td");
    time.append(waterfall(each, longest));
    row.append(status, time, element("td", seconds(each.duration_s), "num"));
    for (const value of [each.prompt_tokens, each.cached_tokens, each.predicted_tokens, each.output_tokens]) {
      row.append(element("td", value ?? "–", "num"));
    }
    row.append(element("td", each.id, "id"));
    return row;
  }));
}

// The decision as the router explains it: one row a candidate, where it lists them. `names`: of
// engines by their URLs.
export function drawWhy(section, box, decision, names) {
  const short = (value) => names.get(value) ?? rounded(value);
  const rows = decision.candidates ?? [];
  const facts = Object.entries(decision).filter(([, value]) => value === null || typeof value !== "object");
  const list = element("p", facts.map(([name, value]) => `${titled(name)}: ${short(value)}`).join(" · "));
  box.replaceChildren(list);
  if (rows.length > 0 && typeof rows[0] === "object") {
    const names = Object.keys(rows[0]);
    const table = element("table");
    const head = element("tr");
    head.append(...names.map((name) => element("th", titled(name))));
    const thead = element("thead");
    thead.append(head);
    const tbody = element("tbody");
    tbody.append(...rows.map((each) => line(names.map((name) => [short(each[name])]))));
    table.append(thead, tbody);
    box.append(table);
  }
  section.hidden = false;
}

// "expected wait (s)", of expected_wait_s.
function titled(name) {
  return name.replace(/_s$/, " (s)").replaceAll("_", " ");
}

function line(cells, span) {
  const row = element("tr");
  for (const [text, classes] of cells) row.append(element("td", text, classes));
  if (span) row.firstChild.colSpan = span;
  return row;
}

function meter(share, what) {
  const box = element("span", undefined, "meter");
  const fill = element("i");
  fill.style.width = percent(Math.min(1, share));
  box.append(fill);
  const both = element("span");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${percent(share)} ${what}`);
  both.append(box, ` ${percent(share)}`);
  return both;
}

function waterfall(request, longest) {
  const box = element("span", undefined, "fall");
  const first = request.ttft_s ?? request.duration_s;
  const parts = [["queue", request.queue_s], ["ttft", first - request.queue_s], ["rest", request.duration_s - first]];
  for (const [name, time] of parts) {
    const part = element("i", undefined, name);
    part.style.width = `${Math.max(0, (100 * time) / longest)}%`;
    box.append(part);
  }
  const said = `queue ${seconds(request.queue_s)} s, first token after ${seconds(first)} s`;
  box.title = said;
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", said);
  return box;
}

function rounded(value) {
  if (typeof value === "number") return Math.round(value * 10000) / 10000;
  return typeof value === "object" && value !== null ? JSON.stringify(value) : value;
}

function sum(rows, name) {
  return rows.reduce((total, row) => total + row[name], 0);
}

function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString() : (Math.round(value * 10) / 10).toLocaleString();
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function seconds(value) {
  return value >= 10 ? value.toFixed(1) : value.toFixed(3);
}

function ago(value) {
  if (value < 1.5) return "now";
  return value < 90 ? `${Math.round(value)} s ago` : `${Math.round(value / 60)} min ago`;
}
