// Markdown as elements. Text is always set as text, and links lead to http and https only, so that
// no answer can bring a script, a style or a form into the page.

const BLOCKS = [
  [/^ {0,3}(```+|~~~+)\s*([^`\n]*)$/, fence],
  [/^ {0,3}(#{1,6})\s+(.*)$/, heading],
  [/^ {0,3}([-*_])(?:\s*\1){2,}\s*$/, rule],
  [/^ {0,3}>/, quote],
  [/^(\s*)([-+*]|\d{1,9}[.)])\s+(.*)$/, list],
  [/^\s*\|.*\|\s*$/, table],
];
// Code spans first: within them nothing else counts.
const INLINE = /(`+)(.+?)\1(?!`)|\*\*\*(?=\S)(.+?)(?<=\S)\*\*\*|\*\*(?=\S)(.+?)(?<=\S)\*\*|__(?=\S)(.+?)(?<=\S)__(?!\w)|\*(?=\S)(.+?)(?<=\S)\*|(?<!\w)_(?=\S)(.+?)(?<=\S)_(?!\w)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|\\([\\`*_{}[\]()#+\-.!|>~])/s;

const MAX_DEPTH = 20; // of quotes in quotes and emphasis in emphasis: deeper ones stay as written

export function markdown(text, depth = 0) {
  const made = document.createDocumentFragment();
  if (depth > MAX_DEPTH) {
    made.append(text);
    return made;
  }
  const lines = text.split("\n");
  for (let at = 0; at < lines.length;) at = block(made, lines, at, depth);
  return made;
}

// One block from line `at` on; the line after it is returned.
function block(parent, lines, at, depth) {
  for (const [pattern, make] of BLOCKS) {
    const found = pattern.exec(lines[at]);
    if (found) return make(parent, lines, at, found, depth);
  }
  if (!lines[at].trim()) return at + 1;
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  parent.append(inline(element("p"), lines.slice(at, end).join("\n")));
  return end;
}

function begins(line) {
  return BLOCKS.some(([pattern]) => pattern.test(line));
}

function fence(parent, lines, at, [, marker]) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(marker) && !line.trim().replaceAll(marker[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = element("code");
  code.textContent = lines.slice(at + 1, end).join("\n");
  const box = element("pre");
  box.tabIndex = 0; // what is wider than the page is reached by keys too
  box.append(code);
  parent.append(box);
  return end + 1;
}

function heading(parent, lines, at, [, marks, text]) {
  const level = Math.min(6, marks.length + 2); // below the page's own
  parent.append(inline(element(`h${level}`), text.replace(/\s#+\s*$/, "")));
  return at + 1;
}

function rule(parent, lines, at) {
  parent.append(element("hr"));
  return at + 1;
}

function quote(parent, lines, at, found, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const box = element("blockquote");
  box.append(markdown(lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth + 1));
  parent.append(box);
  return end;
}

// Items that are indented further belong to the one above them.
function list(parent, lines, at, [, , marker], depth) {
  const isOrdered = /\d/.test(marker);
  const made = element(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(marker, 10) !== 1) made.start = parseInt(marker, 10);
  const item = BLOCKS[4][0];
  const indent = lines[at].search(/\S/);
  while (at < lines.length) {
    if (!lines[at].trim() && item.test(lines[at + 1] ?? "")) at += 1; // items may stand apart
    const found = item.exec(lines[at]);
    if (!found || lines[at].search(/\S/) !== indent || /\d/.test(found[2]) !== isOrdered) break;
    const inner = [found[3]];
    at += 1;
    while (at < lines.length && belongs(lines, at, indent)) inner.push(lines[at++].slice(indent).replace(/^ {1,4}/, ""));
    const one = element("li");
    one.append(markdown(inner.join("\n"), depth + 1));
    if (one.children.length === 1 && one.firstChild.tagName === "P") one.replaceChildren(...one.firstChild.childNodes);
    made.append(one);
  }
  parent.append(made);
  return at;
}

function belongs(lines, at, indent) {
  if (lines[at].trim()) return lines[at].search(/\S/) > indent;
  return lines[at + 1] !== undefined && lines[at + 1].search(/\S/) > indent;
}

function table(parent, lines, at) {
  const divides = (line) => /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/.test(line ?? "");
  if (!divides(lines[at + 1])) {
    parent.append(inline(element("p"), lines[at]));
    return at + 1;
  }
  const made = element("table");
  const row = (line, tag) => {
    const cells = line.trim().slice(1, -1).split(/(?<!\\)\|/);
    const tr = element("tr");
    tr.append(...cells.map((cell) => inline(element(tag), cell.trim())));
    return tr;
  };
  made.append(row(lines[at], "th"));
  for (at += 2; at < lines.length && /^\s*\|.*\|\s*$/.test(lines[at]); at += 1) made.append(row(lines[at], "td"));
  parent.append(made);
  return at;
}

function inline(parent, text, depth = 0) {
  let rest = depth > MAX_DEPTH ? "" : text;
  if (!rest) parent.append(text);
  for (let found; (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    parent.append(rest.slice(0, found.index));
    const [, , code, both, bold, bold2, light, light2, label, address, literal] = found;
    if (code !== undefined) parent.append(element("code", code));
    else if (both) parent.append(inline(element("strong"), `*${both}*`, depth + 1));
    else if (bold ?? bold2) parent.append(inline(element("strong"), bold ?? bold2, depth + 1));
    else if (light ?? light2) parent.append(inline(element("em"), light ?? light2, depth + 1));
    else if (label !== undefined) {
      const link = inline(element("a"), label, depth + 1);
      Object.assign(link, { href: address, target: "_blank", rel: "noopener noreferrer" });
      parent.append(link);
    } else parent.append(literal);
  }
  parent.append(rest);
  return parent;
}

function element(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}
