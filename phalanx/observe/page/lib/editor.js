// A text of TOML with numbered, coloured lines; mistakes stand beside the lines they are on.
import { h, setText } from "./dom.js";

const TOKENS = /(#[^\n]*)|("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'[^'\n]*')|(^[ \t]*\[\[?[^\]\n]*\]\]?)|(^[ \t]*[A-Za-z0-9_."'-]+(?=[ \t]*=))|\b(true|false|[+-]?\d[\d_.eE+-]*)\b/gm;
const KINDS = ["comment", "string", "table", "key", "number"];

export class Editor {
  constructor(label, onchange) {
    this.area = h("textarea", { class: "text", spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", "aria-label": label });
    this.colours = h("pre", { class: "colours", "aria-hidden": "true" });
    this.gutter = h("ol", { class: "gutter", "aria-hidden": "true" });
    this.node = h("div", { class: "editor" }, this.gutter, h("div", { class: "sheet" }, this.colours, this.area));
    this.marked = new Map();
    this.area.addEventListener("input", () => { this.paint(); onchange(); });
    this.area.addEventListener("scroll", () => this.follow());
    this.area.addEventListener("keydown", (event) => {
      if (event.key !== "Tab" || event.shiftKey || event.ctrlKey || event.metaKey || !this.typed) { if (event.key === "Escape") this.typed = false; else if (event.key.length === 1) this.typed = true; return; }
      event.preventDefault(); // after a letter, Tab indents; after Escape it leaves, as everywhere
      document.execCommand("insertText", false, "  ");
    });
  }

  get value() { return this.area.value; }

  set value(text) { this.area.value = text; this.paint(); }

  paint() {
    const text = this.area.value, pieces = [];
    let last = 0;
    for (const match of text.matchAll(TOKENS)) {
      pieces.push(text.slice(last, match.index), h("span", { class: KINDS[match.slice(1).findIndex((each) => each !== undefined)] }, match[0]));
      last = match.index + match[0].length;
    }
    this.colours.replaceChildren(...pieces, text.slice(last), "\n");
    const lines = text.split("\n").length;
    while (this.gutter.children.length > lines) this.gutter.lastChild.remove();
    while (this.gutter.children.length < lines) this.gutter.append(h("li", {}, String(this.gutter.children.length + 1)));
    this.follow();
  }

  // problems: [{line, …}]; a line that changed since keeps its mark until the next answer.
  mark(problems) {
    const wrong = new Set(problems.map((each) => each.line));
    [...this.gutter.children].forEach((each, i) => each.classList.toggle("wrong", wrong.has(i + 1)));
    this.area.setAttribute("aria-invalid", String(problems.length > 0));
  }

  follow() {
    this.colours.style.transform = `translate(${-this.area.scrollLeft}px, ${-this.area.scrollTop}px)`;
    this.gutter.style.transform = `translateY(${-this.area.scrollTop}px)`;
  }

  // The caret goes to the end of a line.
  show(line) {
    const lines = this.area.value.split("\n");
    const at = lines.slice(0, line).join("\n").length;
    this.area.focus();
    this.area.setSelectionRange(at - (lines[line - 1]?.length ?? 0), at);
    const tall = this.area.scrollHeight / Math.max(1, lines.length);
    this.area.scrollTop = Math.max(0, (line - 4) * tall);
  }
}

// What is wrong, each with the line that it leads to.
export function problemList(onpick) {
  const list = h("ul", { class: "problems", role: "status" });
  list.show = (problems) => list.replaceChildren(...problems.map((each) => h("li", {},
    each.line ? h("button", { type: "button", class: "quiet", onclick: () => onpick(each.line) }, `line ${each.line}`) : h("span", { class: "faint" }, "beside it"),
    h("span", {}, h("code", {}, each.value ? `${each.key} = ${each.value}` : each.key), ` ${each.rule}`, h("span", { class: "muted" }, `; ${each.fix}`)))));
  return list;
}

export const setSaid = (node, text, tone) => { node.className = `small ${tone}`; setText(node, text); };
