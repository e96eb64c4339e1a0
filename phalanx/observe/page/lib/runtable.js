// The table of runs: columns that can be ordered, groups that can be folded, boxes that choose.
import { seriesColour } from "./theme.js";
import { fill, h, setText } from "./dom.js";
import { moment, percent, short, span, whole } from "./format.js";
import { grouped, matching, ordered, valueOf } from "./runfilter.js";
import { state } from "./state.js";

const SHOWN = 150;
const MORE = 300;
const SETTINGS = 3; // columns of settings in which runs differ
const FIXED = [["job", "run"], ["state", "state"], ["created", "started"], ["step", "step"], ["loss", "loss"], ["tokens_per_second", "tokens/s"], ["mfu", "MFU"]];
const NUMBERS = new Set(["step", "loss", "tokens_per_second", "mfu"]);
const told = (value) => (value === undefined || value === null ? "" : typeof value === "number" ? short(value, 4) : String(value));

export class RunTable {
  constructor(onsort, ontoggle) {
    Object.assign(this, { onsort, ontoggle, settings: [], limit: SHOWN, folded: new Set() });
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button", { class: "button", type: "button", hidden: true, onclick: () => { this.limit += MORE; this.again(); } });
    this.node = h("div", {}, h("div", { class: "table runtable" }, h("table", {}, h("thead", {}, this.head), this.body)), h("div", { class: "bar more" }, this.more));
  }

  columns(group) {
    const own = this.settings.filter((key) => key !== group).slice(0, SETTINGS);
    return [...FIXED, ...own.map((key) => [key, key.split(".").pop()]), ["tags", "tags"]];
  }

  show(runs, how) {
    this.last = [runs, how];
    const [key, down] = how.sort ? [how.sort.replace(/^-/, ""), how.sort.startsWith("-")] : ["job", true];
    const columns = this.columns(how.group);
    this.heads(columns, key, down);
    this.body.labels = ["draw", ...columns.map(([, text]) => text)];
    const found = ordered(matching(runs, how.find), key, down);
    const rows = [];
    for (const [name, members] of grouped(found, how.group)) {
      if (how.group) rows.push({ group: name, count: members.length, best: Math.min(...members.map((run) => run.last.loss ?? Infinity)), open: !this.folded.has(name) });
      if (!how.group || !this.folded.has(name)) rows.push(...members.map((run) => ({ ...run, at: how.chosen.indexOf(run.job) })));
    }
    fill(this.body, rows.slice(0, this.limit), (row) => row.job ?? `group ${row.group}`, (row) => (row.job ? this.row(row, columns) : this.group(row, how.group, columns.length + 1)));
    this.more.hidden = rows.length <= this.limit;
    setText(this.more, `${whole(rows.length - this.limit)} more`);
    return found.length;
  }

  again() { this.show(...this.last); }

  heads(columns, key, down) {
    fill(this.head, [["", ""], ...columns].map(([name, text]) => [name, text, name === key ? (down ? "descending" : "ascending") : "none"]), ([name]) => name, ([name, text, sort]) => (name
      ? h("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "", "aria-sort": sort }, h("button", { type: "button", class: "sort", onclick: () => this.onsort(sort === "descending" ? name : `-${name}`) }, text, h("span", { "aria-hidden": "true" }, sort === "none" ? "" : sort === "descending" ? " ↓" : " ↑")))
      : h("th", { scope: "col" }, h("span", { class: "hide" }, "chosen"))));
  }

  group({ group: name, count, best, open }, key, width) {
    const fold = () => { this.folded[open ? "add" : "delete"](name); this.again(); };
    return h("tr", { class: "group" }, h("td", { colspan: width, class: "wide" }, h("button", { type: "button", class: "quiet", "aria-expanded": String(open), onclick: fold }, open ? "▾" : "▸", ` ${key} `, h("strong", {}, name)),
      h("span", { class: "muted" }, `${whole(count)} ${count === 1 ? "run" : "runs"}${Number.isFinite(best) ? `, least loss ${short(best, 4)}` : ""}`)));
  }

  row(run, columns) {
    const box = h("input", { type: "checkbox", checked: run.at >= 0, "aria-label": `Draw run ${run.job}`, onchange: () => this.ontoggle(run.job) });
    const cell = ([name]) => {
      if (name === "job") return h("td", {}, h("a", { href: `#/job/${run.job}` }, `${run.job} ${run.name}`), h("div", { class: "faint small" }, `${run.user}${run.team ? `, ${run.team}` : ""}`));
      if (name === "state") return h("td", {}, state(run.state), h("div", { class: "faint small" }, run.ended ? span(run.ended - run.created) : ""));
      if (name === "created") return h("td", { class: "nowrap" }, moment(run.created * 1e9));
      if (name === "tags") return h("td", {}, run.tags.map((tag) => [h("span", { class: "tag" }, tag), " "]), run.notes ? h("span", { class: "faint small", title: "notes" }, ` ✎ ${run.notes}`) : "");
      const value = valueOf(run, name);
      if (name === "mfu") return h("td", { class: "num" }, value === null ? "" : percent(value));
      return h("td", { class: NUMBERS.has(name) ? "num" : "mono small" }, name === "step" && value ? whole(value) : told(value));
    };
    return h("tr", { class: run.at >= 0 ? "chosen" : "", style: run.at >= 0 ? { "--series": seriesColour(run.at) } : {} }, h("td", { class: "pick" }, box), columns.map(cell));
  }
}
