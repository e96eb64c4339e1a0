// Parallel coordinates: an axis for each setting that varies and one for the metric, a line for each trial.
import { h } from "./dom.js";
import { short } from "./format.js";
import { fitCanvas, fontOf, rem } from "./scale.js";
import { colours } from "./theme.js";

const LOG_RATIO = 30; // between the ends of an axis from which on it is logarithmic
const NEAR = 14; // pixels between the pointer and a line that it means

// Numbers, evenly or by their logarithms; or words, in their order.
export function axisOf(name, values) {
  const numbers = values.map(Number);
  if (values.length && values.every((each) => each !== "" && typeof each !== "boolean") && numbers.every(Number.isFinite)) {
    const low = Math.min(...numbers), high = Math.max(...numbers);
    const log = low > 0 && high / low >= LOG_RATIO;
    const place = log ? Math.log : (value) => value;
    const width = place(high) - place(low) || 1;
    return { name, log, at: (value) => (high === low ? 0.5 : (place(Number(value)) - place(low)) / width), ends: [short(low), short(high)] };
  }
  const known = [...new Set(values)].sort();
  return { name, words: known, at: (value) => (known.length < 2 ? 0.5 : known.indexOf(value) / (known.length - 1)), ends: [] };
}

export class Parallel {
  constructor(onpick) {
    this.canvas = h("canvas", { role: "img", "aria-label": "no trial yet", tabIndex: 0 });
    this.hint = h("div", { class: "hint", hidden: true });
    this.node = h("div", { class: "chart tall parallel" }, this.canvas, this.hint);
    this.axes = [];
    this.lines = [];
    this.near = null;
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.near = null; this.hint.hidden = true; this.draw(); });
    this.canvas.addEventListener("click", () => { if (this.near) onpick(this.near.trial); });
    this.canvas.parallel = this;
  }

  // trials: [{settings, value, job, trial, rung}], the best first; ``last``: the rung that counts in full.
  show(trials, metric, last) {
    const keys = [...new Set(trials.flatMap((each) => Object.keys(each.settings)))];
    const varied = keys.filter((key) => new Set(trials.map((each) => each.settings[key])).size > 1);
    const known = trials.filter((each) => each.value !== null);
    this.axes = [...varied.map((key) => axisOf(key, trials.map((each) => each.settings[key] ?? ""))), axisOf(metric, known.map((each) => each.value))];
    this.lines = known.map((trial, place) => ({
      trial, best: 1 - place / Math.max(1, known.length - 1), full: trial.rung === last,
      at: this.axes.map((axis, i) => axis.at(i < varied.length ? trial.settings[varied[i]] ?? "" : trial.value)),
    }));
    const best = known[0];
    this.canvas.setAttribute("aria-label", best ? `${known.length} trials over ${varied.join(", ")}; the best is trial ${best.trial} with ${metric} ${short(best.value, 5)}` : "no trial has ended yet");
    this.draw();
  }

  place(width, height) {
    const edge = { left: 3.2 * rem(), right: 3.2 * rem(), top: 2.2 * rem(), bottom: 1.8 * rem() };
    const step = (width - edge.left - edge.right) / Math.max(1, this.axes.length - 1);
    return { x: (i) => edge.left + i * step, y: (share) => height - edge.bottom - share * (height - edge.top - edge.bottom), edge };
  }

  draw() {
    const { c, width, height } = fitCanvas(this.canvas);
    if (!width || !this.lines.length) return;
    const tone = colours(), { x, y, edge } = this.place(width, height);
    for (const line of [...this.lines].reverse()) this.stroke(c, line, x, y, tone);
    if (this.near) this.stroke(c, this.near, x, y, tone, true);
    c.font = fontOf(0.74);
    c.textAlign = "center";
    this.axes.forEach((axis, i) => {
      c.strokeStyle = tone["strong-line"];
      c.globalAlpha = 1;
      c.lineWidth = 1;
      c.beginPath(); c.moveTo(x(i), edge.top); c.lineTo(x(i), height - edge.bottom); c.stroke();
      c.fillStyle = tone.ink;
      c.fillText(axis.name.split(".").pop() + (axis.log ? " (log)" : ""), x(i), edge.top - 1.1 * rem());
      c.fillStyle = tone.soft;
      if (axis.words) axis.words.slice(0, 12).forEach((word) => c.fillText(String(word).replaceAll('"', "").slice(0, 14), x(i), y(axis.at(word)) - 4));
      else { c.fillText(axis.ends[1], x(i), edge.top - 5); c.fillText(axis.ends[0], x(i), height - edge.bottom + 1.1 * rem()); }
    });
  }

  // The best are drawn in full, those that did not go on faintly.
  stroke(c, line, x, y, tone, chosen = false) {
    c.strokeStyle = chosen ? tone.ink : line.best > 0.9 && line.full ? tone.accent : tone.other;
    c.globalAlpha = chosen ? 1 : (line.full ? 0.35 : 0.12) + 0.45 * line.best ** 3;
    c.lineWidth = chosen ? 2.5 : line.best > 0.9 && line.full ? 2 : 1;
    c.beginPath();
    line.at.forEach((share, i) => (i ? c.lineTo(x(i), y(share)) : c.moveTo(x(i), y(share))));
    c.stroke();
    c.globalAlpha = 1;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = { x: event.clientX - box.left, y: event.clientY - box.top };
    const { x, y } = this.place(box.width, box.height);
    let near = null, least = NEAR;
    for (const line of this.lines) {
      for (let i = 0; i + 1 < line.at.length; i++) {
        const share = (at.x - x(i)) / (x(i + 1) - x(i));
        if (share < 0 || share > 1) continue;
        const off = Math.abs(at.y - (y(line.at[i]) + share * (y(line.at[i + 1]) - y(line.at[i]))));
        if (off < least) { least = off; near = line; }
      }
    }
    if (near === this.near) return;
    this.near = near;
    this.hint.hidden = !near;
    this.hint.style.left = `${Math.max(0, Math.min(at.x + 12, box.width - 16 * rem()))}px`;
    this.hint.style.top = `${at.y + 16}px`;
    if (near) this.hint.textContent = `trial ${near.trial.trial}: ${short(near.trial.value, 5)}; ${Object.entries(near.trial.settings).map(([key, value]) => `${key.split(".").pop()} ${value}`).join(", ")}`;
    this.draw();
  }

  close() { this.watch.disconnect(); }
}
