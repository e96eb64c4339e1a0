// Any metrics of several runs over each other; charts share crosshair, zoom, smoothing and axis.
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { along, bandOf, smooth, usualRange } from "./curves.js";
import { card, fill, h, setText } from "./dom.js";
import { quantity, short, span, tickPercent, whole } from "./format.js";
import { seriesColour } from "./theme.js";

const bytes = (v, digits) => quantity(v, "B", digits);
const RANKS = "ranks"; // own work of every rank, as a band
const METRICS = [
  ["loss", "Loss", short], ["validation_loss", "Loss on unseen text", short], ["grad_norm", "Gradient norm", short], ["learning_rate", "Learning rate", short], ["tokens_per_second", "Tokens per second", short],
  ["mfu", "MFU", tickPercent], ["step_seconds", "Step time", span], [RANKS, "Own work of ranks: least to most", span], ["peak_memory_bytes", "Memory of the fullest rank", bytes], ["data_seconds", "Waiting for data", span],
  ["scaling_efficiency", "Against the smallest world size", tickPercent], ["plan_efficiency", "Against the plan", tickPercent], ["dollars_per_million_tokens", "Dollars per million tokens", short], ["world_size", "Ranks", whole],
];
const USUAL = ["loss", "tokens_per_second", "mfu", "grad_norm"];
const AXIS = { step: ["step", whole], tokens: ["tokens", short], time: ["after", span], flops: ["FLOPs", short] };
const POINTS = 600, COLUMNS = 200;

export class Overlay {
  constructor(onchange) {
    Object.assign(this, { onchange, group: [], runs: [], data: new Map(), axis: "step", weight: 0, usual: true, names: USUAL });
    this.metrics = [...METRICS]; // and scores, as runs have them
    this.charts = METRICS.map((each) => this.chart(...each));
    this.smoothing = h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => onchange({ smooth: Number(this.smoothing.value) ? this.smoothing.value : "" }) });
    this.told = h("output", {});
    this.outliers = h("input", { type: "checkbox", checked: true, onchange: () => onchange({ all: this.outliers.checked ? "" : "1" }) });
    this.picks = h("ul", { class: "picks" });
    this.node = h("div", { class: "grid overlay" }, card("Curves", "the crosshair and a dragged zoom are shared; double-click shows all again", h("div", {}, this.picks,
      h("div", { class: "bar" }, h("div", { class: "slider smoothing" }, h("label", { for: "smoothing" }, "Smoothing", this.told), this.smoothing), h("label", { class: "tick" }, this.outliers, " leave outliers to the edge")))), ...this.charts.map((each) => each.card));
  }

  chart(name, label, format) {
    const chart = new Chart({ label, format, group: this.group, unnamed: true, zoomed: (zoom) => this.onchange({ zoom: zoom ? zoom.map((each) => each.toPrecision(6)).join(":") : "" }) });
    return { name, chart, card: card(label, "", chart.node, "half") };
  }

  // What only some runs have: scores of tasks and domains.
  offer(runs) {
    for (const name of new Set(runs.flatMap((run) => run.scores))) {
      if (this.metrics.some(([each]) => each === name)) continue;
      this.metrics.push([name, name, short]);
      const made = this.chart(name, name, short);
      made.chart.zoom = this.group[0].zoom;
      this.charts.push(made);
      this.node.append(made.card);
    }
    this.pick();
  }

  pick() {
    fill(this.picks, this.metrics.map(([name, label]) => [name, label, this.names.includes(name)]), ([name]) => name, ([name, label, on]) => h("li", {}, h("label", { class: `tag ${on ? "on" : ""}` }, h("input", { type: "checkbox", checked: on, onchange: () => this.toggle(name) }), ` ${label}`)));
  }

  read({ axis, smooth: weight, metrics, zoom, all }) {
    this.axis = AXIS[axis] ? axis : "step";
    this.weight = Math.min(0.99, Math.max(0, Number(weight) || 0));
    this.usual = !all;
    this.outliers.checked = this.usual;
    this.smoothing.value = this.weight;
    setText(this.told, this.weight ? this.weight.toFixed(2) : "none");
    const wanted = metrics.split(",").filter(Boolean);
    this.names = wanted.length ? wanted : USUAL;
    const [from, to] = zoom.split(":").map(Number);
    for (const each of this.group) each.zoom = to > from ? [from, to] : null;
    this.pick();
  }

  toggle(name) {
    const next = this.metrics.map(([each]) => each).filter((each) => (each === name ? !this.names.includes(name) : this.names.includes(each)));
    this.onchange({ metrics: next.join(",") });
  }

  async show(runs) {
    this.runs = runs;
    this.node.hidden = !runs.length;
    this.offer(runs);
    await Promise.all(runs.map((run) => this.fetch(run)));
    this.draw();
  }

  // What an ended run has is fetched once.
  async fetch(run) {
    const known = this.data.get(run.job), needed = this.names.filter((name) => name !== RANKS && !(name in (known?.series ?? {})) && !known?.without?.has(name));
    const fresh = !known || !run.ended ? [...new Set([...this.names.filter((name) => name !== RANKS), "tokens_seen"])] : needed;
    const ranks = this.names.includes(RANKS) && (!known?.ranks || !run.ended);
    if (!fresh.length && !ranks) return;
    const [found, band] = await Promise.all([fresh.length ? get(`/v1/jobs/${run.job}/metrics?names=${encodeURIComponent(fresh.join(","))}&points=${POINTS}`) : { series: {} },
      ranks ? get(`/v1/jobs/${run.job}/ranks?columns=${COLUMNS}`) : null]).catch((problem) => { if (problem.status === 404) return [{ series: {} }, null]; throw problem; });
    const without = new Set([...(known?.without ?? []), ...fresh.filter((name) => !found.series[name])]);
    this.data.set(run.job, { series: { ...known?.series, ...found.series }, ranks: band ?? known?.ranks, without });
  }

  x(run, steps, times) {
    if (this.axis === "step") return steps;
    if (this.axis === "time") return times.map((each) => each - (run.placed ?? this.data.get(run.job).series.tokens_seen?.time[0] ?? times[0]));
    const seen = this.data.get(run.job).series.tokens_seen;
    const scale = this.axis === "flops" ? run.flops_per_token : 1;
    return seen && scale ? steps.map((step) => along(seen.step, seen.value, step) * scale) : [];
  }

  series(run, i, name) {
    const { series, ranks } = this.data.get(run.job) ?? { series: {} };
    const colour = seriesColour(i), label = `${run.job} ${run.name}`;
    if (name === RANKS) {
      if (!ranks?.steps.length) return [];
      const rows = ranks.own_seconds.some((row) => row.some((value) => value !== null)) ? ranks.own_seconds : ranks.step_seconds;
      return [{ name: label, colour, x: this.x(run, ranks.steps, ranks.time), ...bandOf(rows, ranks.steps.length) }];
    }
    const one = series[name];
    if (!one?.value.some((value) => value !== null)) return [];
    const x = this.x(run, one.step, one.time), few = name === "validation_loss" || run.scores.includes(name);
    if (!this.weight || few) return [{ name: label, colour, x, y: one.value, min: one.min, max: one.max, points: few }];
    return [{ name: label, colour, x, y: one.value, faint: true }, { name: label, colour, x, y: smooth(one.value, this.weight, this.usual ? usualRange(one.value) : null) }];
  }

  draw() {
    const [x, formatX] = AXIS[this.axis];
    for (const { name, chart, card: box } of this.charts) {
      const lines = this.names.includes(name) ? this.runs.flatMap((run, i) => this.series(run, i, name)) : [];
      box.hidden = !lines.length;
      Object.assign(chart.options, { x, formatX, usual: this.usual });
      if (lines.length) chart.show(lines);
      box.note(lines.length && !lines.some((each) => each.x.length) ? `nobody told ${x} of these runs` : "");
    }
  }

  repaint() { this.draw(); }

  close() { for (const chart of this.group) chart.close(); }
}
