// What a change would make of a job, beside now; and the button that carries it out.
import { askFor, refusedTo } from "./actions.js";
import { post } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { fill, h, setText, table } from "./dom.js";
import { dollars, percent, short, span, whole } from "./format.js";

const NUMBERS = [
  ["gpus", "GPUs", 1], ["parallel.tensor", "Tensor", 1], ["parallel.pipeline", "Pipeline", 1], ["train.micro_batch", "Micro-batch", 1],
  ["interval_seconds", "Save every, s", 1], ["spares", "Spare nodes", 0],
];
const PRECISIONS = ["float32", "float16", "bfloat16", "fp8"];
const between = (range, show) => [show(range.mid), h("small", { class: "muted" }, ` ${show(range.low)} to ${show(range.high)}`)];
const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);
const ROWS = [
  ["mapping", (o) => o.mapping], ["GPUs", (o) => whole(o.gpus)], ["step", (o) => between(o.step_seconds, span)],
  ["tokens per second", (o) => short(o.tokens_per_second)], ["MFU", (o) => percent(o.mfu, o.mfu < 0.1 ? 2 : 1)], ["goodput", (o) => percent(o.goodput)],
  ["left to train", (o) => between(o.hours, (hours) => span(hours * 3600))], ["price of that", (o) => between(o.dollars, dollars)],
  ["memory of a GPU", (o) => `${gib(o.memory_bytes)} of ${gib(o.memory_limit)} GiB`],
];

export class WhatIf {
  constructor(number) {
    this.path = `/v1/jobs/${number}`;
    this.fields = Object.fromEntries(NUMBERS.map(([key, label, least]) => [key, h("input", { class: "field", type: "number", min: least, step: 1, placeholder: "as now", "aria-label": label, oninput: () => this.forget() })]));
    this.precision = h("select", { class: "pick", "aria-label": "Precision", onchange: () => this.forget() }, h("option", { value: "" }, "as now"), PRECISIONS.map((name) => h("option", { value: name }, name)));
    this.best = h("button", { class: "button", type: "button", onclick: () => this.ask(true) }, "Best mapping");
    this.asks = h("button", { class: "button primary" }, "Ask");
    this.apply = h("button", { class: "button", type: "button", hidden: true, onclick: () => this.carryOut() }, "Carry it out");
    this.said = h("p", { class: "small", role: "status" });
    this.line = new CommandLine();
    this.number = number;
    this.answer = table(["", "now", "then"]);
    this.answer.hidden = true;
    const inputs = [...NUMBERS.map(([key, label]) => h("label", {}, label, this.fields[key])), h("label", {}, "Precision", this.precision)];
    this.node = h("form", { class: "sliders whatif", onsubmit: (event) => { event.preventDefault(); this.ask(false); } },
      h("div", { class: "asked" }, inputs), h("div", { class: "bar" }, this.asks, this.best, this.apply), this.said, this.answer, this.line.node);
  }

  // Anybody may ask; who may not carry it out sees why.
  allow(role) {
    this.refused = refusedTo(role, "admin", "user");
    this.apply.title = this.refused;
    this.apply.disabled = Boolean(this.refused);
  }

  command(verb, body, ...more) {
    const given = (name, value, none) => (value === undefined || value === none ? [] : [name, value]);
    return shellWords("phalanx", verb, this.number, ...body.settings.flatMap((each) => ["--set", each]), ...given("--gpus", body.gpus, 0), ...given("--interval", body.interval_seconds, 0),
      ...given("--spares", body.spares, -1), ...given("--precision", body.precision, ""), ...(body.search ? ["--search"] : []), ...more);
  }

  body(search) {
    const given = Object.entries(this.fields).filter(([, field]) => field.value !== "");
    const settings = given.filter(([key]) => key.includes(".")).map(([key, field]) => `${key}=${field.value}`);
    const numbers = Object.fromEntries(given.filter(([key]) => !key.includes(".")).map(([key, field]) => [key, Number(field.value)]));
    return { settings, ...numbers, precision: this.precision.value, search };
  }

  // What is asked for is not what was answered any more.
  forget() {
    this.asked = null;
    this.apply.hidden = true;
    this.line.set("");
    this.answer.classList.add("pale");
  }

  async ask(search) {
    const body = this.body(search);
    await this.busy("asking the planner …", async () => {
      this.show(await post(`${this.path}/what-if`, body));
      this.asked = body;
      this.apply.hidden = false;
      this.line.set(this.command("what-if", body));
    });
  }

  carryOut() {
    const { asked } = this;
    askFor({
      title: `Change job ${this.number}`, verb: "Change it", text: "It saves its state at the next step boundary and goes on with the other mapping.",
      command: (why) => this.command("replan", asked, "--apply", ...(why ? ["--why", why] : [])), send: (why) => post(`${this.path}/replan`, { ...asked, why }), done: () => this.forget(),
    });
  }

  async busy(words, work) {
    for (const each of [this.asks, this.best, this.apply]) each.disabled = true;
    this.said.className = "small muted";
    setText(this.said, words);
    try {
      await work();
    } catch (problem) {
      this.forget();
      this.said.className = "small bad";
      setText(this.said, problem.message);
    } finally {
      for (const each of [this.asks, this.best]) each.disabled = false;
      this.apply.disabled = Boolean(this.refused);
    }
  }

  show({ now, then, changed, calibration }) {
    this.answer.hidden = false;
    this.answer.classList.remove("pale");
    const own = calibration === 1 ? "no step was measured yet: this is the planner's word alone" : `its steps take ${calibration.toFixed(2)} times what is predicted, and so will the change`;
    setText(this.said, `${changed.length ? changed.join(", ") : "as it is"}; ${own}`);
    fill(this.answer.body, ROWS.map(([name]) => [name, now, then]), ([name]) => name, ([name]) => {
      const show = ROWS.find(([each]) => each === name)[1];
      return h("tr", {}, h("td", { class: "muted" }, name), h("td", {}, show(now)), h("td", { class: "strong" }, show(then)));
    });
  }
}
