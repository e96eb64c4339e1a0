// Ctrl-K or ⌘K: every view, job, node and saved view by a few letters.
import { Refused, get } from "./api.js";
import { fill, h } from "./dom.js";

const SHOWN = 12;

// Letters in their order, the nearer together the better; -1: they are not there.
export function fits(text, wanted) {
  const low = text.toLowerCase();
  const whole = low.indexOf(wanted);
  if (whole >= 0) return whole + (whole && /\w/.test(low[whole - 1]) ? 10 : 0);
  let at = -1, gaps = 0;
  for (const letter of wanted) {
    const next = low.indexOf(letter, at + 1);
    if (next < 0) return -1;
    gaps += next - at - 1;
    at = next;
  }
  return 50 + gaps;
}

export class Palette {
  // views: [[title, address]]
  constructor(views) {
    this.views = views.map(([title, address]) => ({ title, kind: "view", address }));
    this.found = [];
    this.input = h("input", { class: "field", role: "combobox", "aria-expanded": "true", "aria-controls": "palette-list", "aria-label": "Go to", placeholder: "A view, job, node or saved view", autocomplete: "off", oninput: () => this.show(), onkeydown: (event) => this.key(event) });
    this.list = h("ul", { id: "palette-list", role: "listbox", "aria-label": "Found" });
    this.box = h("dialog", { class: "palette", "aria-label": "Go to", onclick: (event) => { if (event.target === this.box) this.box.close(); } }, this.input, this.list, h("p", { class: "small faint" }, "↑ ↓ choose, Enter goes, Esc closes"));
  }

  async open() {
    if (this.box.open) return this.box.close();
    if (!this.box.isConnected) document.body.append(this.box);
    this.input.value = "";
    this.entries = this.views;
    this.show();
    this.box.showModal();
    let found;
    try {
      found = await Promise.all([get("/v1/jobs?state=all&limit=1000&newest=true"), get("/v1/fleet"), get("/v1/views")]);
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      return; // the server is away: views can be gone to all the same
    }
    const [jobs, fleet, saved] = found;
    this.entries = [...this.views, ...saved.views.map((each) => ({ title: each.name, kind: "saved view", address: each.address })),
      ...jobs.jobs.toReversed().map((job) => ({ title: `${job.id} ${job.name}`, kind: `job, ${job.state}`, address: `#/job/${job.id}` })),
      ...fleet.names.map((name) => ({ title: name, kind: "node", address: `#/node/${encodeURIComponent(name)}` }))];
    this.show();
  }

  show() {
    const wanted = this.input.value.trim().toLowerCase();
    this.found = wanted ? this.entries.map((each) => [fits(each.title, wanted), each]).filter(([rank]) => rank >= 0).sort(([a], [b]) => a - b).slice(0, SHOWN).map(([, each]) => each) : this.entries.slice(0, SHOWN);
    this.choose(0);
  }

  choose(at) {
    this.at = Math.max(0, Math.min(this.found.length - 1, at));
    fill(this.list, this.found.map((each, i) => [each, i, i === this.at]), ([each]) => each.kind + each.address, ([each, i, on]) => h("li", { id: `palette-${i}`, role: "option", "aria-selected": String(on), onclick: () => this.go(each) }, h("span", {}, each.title), h("span", { class: "faint small" }, each.kind)));
    this.input.setAttribute("aria-activedescendant", this.found.length ? `palette-${this.at}` : "");
    this.list.children[this.at]?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { this.choose(this.at + step); event.preventDefault(); }
    if (event.key === "Enter" && this.found[this.at]) this.go(this.found[this.at]);
  }

  go(entry) { this.box.close(); location.hash = entry.address; }
}
