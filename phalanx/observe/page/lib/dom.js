// Elements are made by hand and strings become text nodes: nothing that a user, a job or a log
// says is ever read as markup.
export function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

export function svg(viewBox, ...paths) {
  const space = "http://www.w3.org/2000/svg";
  const made = document.createElementNS(space, "svg");
  made.setAttribute("viewBox", viewBox);
  made.setAttribute("aria-hidden", "true");
  for (const [tag, attributes] of paths) {
    const part = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
    made.append(part);
  }
  return made;
}

// Rows that did not change stay as they are, so that focus and selection survive an update.
export function fill(parent, items, keyOf, build) {
  const known = parent.keyed ?? new Map();
  const next = new Map();
  const nodes = items.map((item) => {
    const key = String(keyOf(item));
    const text = JSON.stringify(item);
    const old = known.get(key);
    const node = old && old.text === text ? old.node : labelled(build(item), parent.labels);
    next.set(key, { text, node });
    return node;
  });
  parent.keyed = next;
  const same = parent.childNodes.length === nodes.length && nodes.every((node, i) => parent.childNodes[i] === node);
  if (!same) parent.replaceChildren(...nodes);
}

// On narrow screens a row becomes a card, whose cells name their column.
function labelled(row, labels) {
  labels?.forEach((text, i) => { if (text && row.cells?.[i]) row.cells[i].dataset.label = text; });
  return row;
}

// Sentences with commands between backticks: those are shown as code.
export const prose = (text) => String(text).split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function card(title, note, body, extra = "") {
  const noteNode = h("span", { class: "note" }, note ?? "");
  const head = h("header", {}, h("h2", {}, title), noteNode);
  const made = h("section", { class: `card ${extra}`, "aria-label": title }, head, body);
  made.head = head;
  made.note = (text) => setText(noteNode, text);
  return made;
}

export function figure(name) {
  const value = h("dd", {}, "–");
  const under = h("dd", { class: "under" });
  const made = h("div", { class: "figure" }, h("dt", {}, name), value, under);
  made.set = (text, unit = "", below = "", tone = "") => {
    const key = `${text}|${unit}|${below}|${tone}`;
    if (made.key === key) return;
    made.key = key;
    value.replaceChildren(String(text), unit ? h("small", {}, unit) : "");
    value.className = tone;
    setText(under, below);
  };
  return made;
}

export function segmented(label, options, chosen, onpick) {
  const made = h("div", { class: "segmented", role: "group", "aria-label": label });
  const mark = (value) => {
    for (const each of made.children) each.setAttribute("aria-pressed", String(each.dataset.value === value));
  };
  for (const [value, text] of options) {
    made.append(h("button", { type: "button", "data-value": value, onclick: () => { mark(value); onpick(value); } }, text));
  }
  mark(chosen);
  made.mark = mark;
  return made;
}

export function empty(title, ...next) {
  return h("div", { class: "empty" }, h("strong", {}, title), ...next);
}

export function table(headings) {
  const body = h("tbody");
  const cells = headings.map((each) => {
    const [text, kind] = Array.isArray(each) ? each : [each, ""];
    return h("th", { class: kind, scope: "col" }, text);
  });
  const made = h("div", { class: "table" }, h("table", {}, h("thead", {}, h("tr", {}, cells)), body));
  made.body = body;
  body.labels = headings.map((each) => (Array.isArray(each) ? each[0] : each));
  return made;
}

export function rowLink(href, ...cells) {
  const made = h("tr", { class: "link", onclick: (event) => {
    if (!event.target.closest("a, button") && !String(getSelection())) location.hash = href;
  } }, cells);
  return made;
}
