// Every rank's own record of one step, fetched from the nodes' rings when somebody asks.
import { stream } from "./api.js";
import { counted, span, whole } from "./format.js";
import { fill, h, table } from "./dom.js";

const PARTS = [["own", "own work"], ["host", "at its host's pace"], ["launch", "its host"], ["data", "data"], ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["snapshot", "snapshot"], ["peer_wait", "waiting for others"]];
const SHOWN = 200;
const time = (value) => (value === null || value === undefined ? "–" : span(value));

export class RankRecords {
  constructor(job) {
    this.job = job;
    this.newest = 0; // a step that every rank has made
    this.asked = false;
    this.step = h("input", { type: "number", min: 1, class: "field", "aria-label": "Step" });
    this.told = h("p", { class: "muted small", role: "status" });
    this.table = table(["rank", "step", ...PARTS.map(([, name]) => name), "memory"]);
    this.table.hidden = true;
    this.node = h("details", { class: "closer" }, h("summary", {}, "Every rank of one step, as its node recorded it"),
      h("div", { class: "bar logbar" }, h("label", { class: "rank" }, "Step", this.step), h("button", { class: "button", type: "button", onclick: () => this.show() }, "Ask the nodes")), this.told, this.table);
    this.node.addEventListener("toggle", () => this.first());
    this.step.addEventListener("keydown", (event) => { if (event.key === "Enter") this.show(); });
  }

  // The gang has made this step. Its ranks may be about to write it down: all have the one before it.
  made(step) {
    this.newest = Math.max(0, step - 1);
    this.first();
  }

  // Whoever opens the list before any step is known sees the first one that is.
  first() {
    if (this.node.open && !this.asked && this.newest) this.show(this.newest);
  }

  async show(step = Number(this.step.value)) {
    this.asked = this.node.open = true;
    this.step.value = step || this.newest;
    this.told.textContent = "asking every node of the job…";
    let text = "";
    try {
      for await (const piece of stream(`/v1/jobs/${this.job}/records?first=${this.step.value}&last=${this.step.value}`)) text += piece;
    } catch (problem) {
      this.told.textContent = problem.message;
      return;
    }
    const lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const found = lines.filter((each) => each.rank !== undefined).sort((a, b) => (b.parts.own ?? b.step_seconds) - (a.parts.own ?? a.step_seconds));
    const problems = lines.filter((each) => each.problem).map((each) => each.problem);
    this.table.hidden = !found.length;
    this.told.textContent = [found.length ? `${counted(found.length, "record")}, slowest first` : `no node holds step ${whole(Number(this.step.value))} any more: rings keep the newest steps of the gang that runs`, ...problems].join("; ");
    fill(this.table.body, found.slice(0, SHOWN), (each) => `${each.rank} ${each.generation}`, (each) => h("tr", {}, h("td", {}, whole(each.rank)), h("td", { class: "num" }, time(each.step_seconds)),
      PARTS.map(([name]) => h("td", { class: "num" }, time(each.parts[name]))), h("td", { class: "num" }, each.peak_memory_bytes ? `${(each.peak_memory_bytes / 2 ** 30).toFixed(2)} GiB` : "–")));
  }
}
