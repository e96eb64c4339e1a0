// Scores of a model while it trains: a chart each, over steps.
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { short } from "./format.js";

const MOST = 12; // charts; `phalanx runs show` lists every score
const COUNTED = ".tokens"; // how much was scored: the same each time

export class ScoreCurves {
  constructor(job, group) {
    this.job = job;
    this.group = group;
    this.charts = new Map();
    this.node = h("div", { class: "grid curves" });
  }

  // Of the newest scores by name; answers whether there are any.
  async show(scores, marks) {
    const names = Object.keys(scores).filter((name) => !name.endsWith(COUNTED)).slice(0, MOST);
    if (!names.length) return false;
    const { series } = await get(`/v1/jobs/${this.job}/metrics?names=${encodeURIComponent(names.join(","))}&points=400`);
    for (const name of names) if (series[name]) this.chart(name).show([{ name, x: series[name].step, y: series[name].value, points: true }], marks);
    return true;
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const chart = new Chart({ label: name, unit: "", format: short, group: this.group });
      this.charts.set(name, chart);
      this.node.append(h("div", { class: "half curve" }, h("h3", {}, name), chart.node));
    }
    return this.charts.get(name);
  }
}
