// The chat of a page: a conversation with the server that the page came from. The page has the
// elements, by the ids that are used here. Nothing is stored but the API key, and that only until
// the tab is closed.

import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const MAX_PICTURE_BYTES = 20 * 2 ** 20;

let conversation = [];
let answering = null; // an AbortController while an answer is streamed
let picture = null; // a data: URL that goes with the next message

export function setKey(key) {
  sessionStorage.setItem("octavo-key", key.trim());
}

export function headers(more = {}) {
  const key = sessionStorage.getItem("octavo-key");
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let part; !(part = await reader.read()).done;) {
    buffer += part.value;
    for (let at; (at = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(at + 2)) {
      const data = buffer.slice(0, at).split("\n").filter((line) => line.startsWith("data: "));
      if (data.length > 0) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

// The models that may be chosen; the list is left alone while nothing changes, as it may be open.
export function showModels(names) {
  const select = $("model");
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  showCurl();
}

// The request that `text` would make now.
export function request(text) {
  const fields = { model: $("model").value, messages: [...conversation, question(text)] };
  if ($("temperature").value !== "") fields.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") fields.max_tokens = Number($("max-tokens").value);
  return fields;
}

function question(text) {
  if (picture === null) return { role: "user", content: text };
  return { role: "user", content: [{ type: "image_url", image_url: { url: picture } }, { type: "text", text }] };
}

// `post(fields, signal)` sends a request and returns its response.
export function startChat(post = plainPost) {
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || answering) return;
    $("prompt").value = "";
    send(text, post);
  });
  $("chat-form").addEventListener("input", showCurl);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("chat-form").requestSubmit();
  });
  $("stop").addEventListener("click", () => answering?.abort());
  $("clear").addEventListener("click", () => {
    answering?.abort();
    conversation = [];
    $("messages").replaceChildren();
    attach(null);
  });
  $("picture").addEventListener("change", () => readPicture($("picture").files[0]));
  $("copy").addEventListener("click", copyCurl);
}

export function plainPost(fields, signal, more = {}) {
  return fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "content-type": "application/json", ...more }),
    body: JSON.stringify(fields), signal,
  });
}

async function send(text, post) {
  answering = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("speed").textContent = "";
  const asked = question(text);
  const fields = { ...request(text), stream: true, stream_options: { include_usage: true } };
  const answer = showTurn(text);
  attach(null);
  const began = performance.now();
  let first = null, tokens = null;
  try {
    const response = await post(fields, answering.signal);
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      tokens = event.usage?.completion_tokens ?? tokens;
      const delta = event.choices?.[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning) continue;
      first ??= performance.now();
      answer.add(delta.content ?? "", delta.reasoning ?? "");
    }
    conversation.push(asked, { role: "assistant", content: answer.text });
  } catch (error) {
    const isStopped = error.name === "AbortError";
    answer.note(isStopped ? "[stopped]" : error.message, isStopped ? "note" : "error");
  } finally {
    answer.draw();
    answering = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    if (first !== null) $("speed").textContent = speed(began, first, tokens);
    showCurl();
  }
}

function speed(began, first, tokens) {
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 ? `, then ${((tokens - 1) / seconds).toFixed(0)} tokens per second` : "";
  return `first token after ${Math.round(first - began)} ms${rate}`;
}

// The user's message and an answer to be filled; it is drawn once a frame however fast it comes.
function showTurn(text) {
  const messages = $("messages");
  const user = element("p", text, "user");
  if (picture !== null) user.prepend(Object.assign(element("img"), { src: picture, alt: "the picture sent" }));
  const box = element("div", undefined, "answer");
  messages.append(user, box);
  let reasoning = "", drawing = 0;
  const answer = {
    text: "",
    add(content, thought) {
      answer.text += content;
      reasoning += thought;
      drawing ||= requestAnimationFrame(answer.draw);
    },
    draw() {
      cancelAnimationFrame(drawing);
      drawing = 0;
      const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
      box.replaceChildren(...(reasoning ? [element("p", reasoning, "reasoning")] : []), markdown(answer.text));
      if (isAtEnd) messages.scrollTop = messages.scrollHeight;
    },
    note(said, kind) {
      messages.append(element("p", said, kind));
    },
  };
  messages.scrollTop = messages.scrollHeight;
  return answer;
}

function readPicture(file) {
  if (!file) return attach(null);
  if (file.size > MAX_PICTURE_BYTES) {
    attach(null);
    $("speed").textContent = "the picture is larger than 20 MiB";
    return;
  }
  const reader = new FileReader();
  reader.addEventListener("load", () => attach(reader.result, file.name));
  reader.addEventListener("error", () => { $("speed").textContent = `${file.name} cannot be read`; });
  reader.readAsDataURL(file);
}

function attach(url, name = "") {
  picture = url;
  if (url === null) $("picture").value = "";
  else $("speed").textContent = `${name} goes with the next message`;
  showCurl();
}

export function showCurl() {
  const fields = request($("prompt").value.trim() || "What is an octavo?");
  const json = JSON.stringify(fields, shorten, 1);
  const url = new URL("v1/chat/completions", location.href).href;
  const key = sessionStorage.getItem("octavo-key") ? ' -H "authorization: Bearer $OCTAVO_API_KEY"' : "";
  const quoted = json.replaceAll("'", "'\\''");
  $("curl").textContent = `curl ${url} -H 'content-type: application/json'${key} -d '${quoted}'`;
}

// A picture would be megabytes of text.
function shorten(name, value) {
  const isLong = name === "url" && value.startsWith("data:") && value.length > 2000;
  return isLong ? `${value.slice(0, 40)}… (${value.length} characters)` : value;
}

async function copyCurl() {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copied").textContent = "copied";
  } catch {
    getSelection().selectAllChildren($("curl")); // no clipboard over plain HTTP from elsewhere
    $("copied").textContent = "selected: copy it with Ctrl-C";
  }
}

function element(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}
