// Rank × step: each cell is a rank's step time over the median of that step. Most cells are pale;
// a rank that holds the others up is a line that one cannot miss, and it is named beside it.
import { h } from "./dom.js";
import { heatScale } from "./fleetcolour.js";
import { counted, span, whole } from "./format.js";
import { before, fitCanvas, fontOf, rem, ticks } from "./scale.js";
import { colours } from "./theme.js";

const RIGHT = 10;
let LEFT = 64, BOTTOM = 24; // as wide as their text
const FEW_ROWS = 8; // need no more than two lines each
const HIGHEST = 1.18; // times the median: the strongest colour

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// The median of each step over the rows of each stage: stages have unequal work.
export function medians(rows, columns, stages) {
  const each = rows.length / stages;
  return Array.from({ length: stages }, (_, stage) => {
    const peers = rows.slice(stage * each, (stage + 1) * each);
    return Float64Array.from({ length: columns }, (_, column) => {
      const values = peers.map((row) => row[column]).filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
      return values.length ? values[(values.length - 1) >> 1] : NaN;
    });
  });
}

const LEAST_PEERS = 4, LEAST_RATIO = 1.08, LEAST_SHARE = 0.75, RECENT_STEPS = 20, LEAST_COLUMNS = 5;

// Columns that the last steps are in; a column may stand for several.
const recentColumns = (steps) => {
  const each = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
  return Math.max(LEAST_COLUMNS, Math.min(RECENT_STEPS, Math.round(RECENT_STEPS / Math.max(1, each))));
};

// Rows that are slower than their peers for good: in three of four of their last steps.
export function outliers(rows, middles, recent = RECENT_STEPS) {
  const each = rows.length / middles.length;
  if (each < LEAST_PEERS) return [];
  const found = [];
  rows.forEach((row, index) => {
    const middle = middles[Math.floor(index / each)];
    const ratios = [];
    for (let i = row.length - 1; i >= 0 && ratios.length < recent; i--) if (row[i] !== null && row[i] !== undefined && middle[i] > 0) ratios.push(row[i] / middle[i]);
    if (ratios.length < LEAST_COLUMNS || ratios.filter((ratio) => ratio >= LEAST_RATIO).length < LEAST_SHARE * ratios.length) return;
    ratios.sort((a, b) => a - b);
    found.push({ index, ratio: ratios[ratios.length >> 1] });
  });
  return found.sort((a, b) => b.ratio - a.ratio);
}

export class HeatMap {
  constructor() {
    this.canvas = h("canvas", { role: "img", tabIndex: 0, "aria-label": "Step time by rank: no data yet" });
    this.hint = h("div", { class: "hint", hidden: true });
    this.node = h("div", { class: "heat" }, this.canvas, this.hint);
    this.canvas.heat = this;
    this.watch = new ResizeObserver(() => { if (this.data) this.pixels(); this.draw(); });
    this.watch.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => { const step = this.data?.steps[this.at(event).column]; if (step) this.pick?.(step); });
    this.canvas.addEventListener("pointerleave", () => { this.hint.hidden = true; });
  }

  // data: {steps, rows (node|rank), ranks, nodes, step_seconds, own_seconds}. The ranks of a gang wait
  // for each other, so that whole steps are equally long; who is slow shows in the time of its own.
  // marks: [{x: step, tone}], where something happened.
  show(data, stages = 1, marks = []) {
    this.marks = marks;
    const own = data.own_seconds?.some((row) => row.some((value) => value !== null));
    this.cells = own ? data.own_seconds : data.step_seconds;
    this.own = own;
    this.data = data;
    this.columns = data.steps.length;
    this.stages = this.cells.length % stages ? 1 : stages;
    this.middles = medians(this.cells, this.columns, this.stages);
    this.slow = outliers(this.cells, this.middles, recentColumns(data.steps));
    this.canvas.style.height = this.cells.length <= FEW_ROWS ? `${Math.max(3, this.cells.length) * 2 + 1.6}rem` : "";
    this.pixels();
    const told = this.slow.slice(0, 3).map((each) => `${this.name(each.index)} is ${Math.round((each.ratio - 1) * 100)} % slower`).join(", ");
    this.canvas.setAttribute("aria-label", `Step time of ${counted(data.ranks.length, data.rows === "node" ? "node" : "rank")} over ${counted(this.columns, "step")}: ${told || "no rank is slower than the others"}`);
    this.draw();
  }

  name(index) {
    const { ranks, nodes, rows } = this.data;
    return rows === "node" ? nodes[index] : `rank ${ranks[index]}${nodes[index] ? ` on ${nodes[index]}` : ""}`;
  }

  // A cell over the median of its peers; NaN where either is not known.
  ratio(row, column) {
    const value = this.cells[row][column];
    const middle = this.middles[Math.floor((row * this.stages) / this.cells.length)][column];
    return value === null || value === undefined || !(middle > 0) ? NaN : value / middle;
  }

  // One pixel a cell, and no more rows than the screen can show three pixels high: of rows that
  // fall together the slowest is shown, so that one in 12,500 is not lost.
  pixels() {
    const rows = this.cells;
    const tall = Math.min(rows.length, Math.max(40, Math.floor((this.canvas.getBoundingClientRect().height - BOTTOM) / 3)));
    const ratios = new Float32Array(Math.max(1, tall * this.columns));
    rows.forEach((_, index) => {
      const from = Math.floor((index * tall) / rows.length) * this.columns;
      for (let column = 0; column < this.columns; column++) {
        const ratio = this.ratio(index, column);
        if (ratio > ratios[from + column]) ratios[from + column] = ratio;
      }
    });
    const known = ratios.filter((ratio) => ratio > 0).sort();
    // Half of all cells are palest, whatever their noise: what stands out is what differs.
    const low = Math.min(1.1, known.length ? known[known.length >> 1] : 1);
    // Where everybody varies, only what varies more is strong.
    const usual = known.length ? known[Math.floor(known.length * 0.9)] - low : 0;
    const high = Math.max(HIGHEST, low + 3 * usual);
    this.range = [low, high];
    const scale = heatScale().map(rgb);
    const empty = rgb(colours().sunken);
    const image = new ImageData(Math.max(1, this.columns), Math.max(1, tall));
    ratios.forEach((ratio, i) => image.data.set([...(ratio ? shade(scale, (ratio - low) / (high - low)) : empty), 255], 4 * i));
    this.image = new OffscreenCanvas(image.width, image.height);
    this.image.getContext("2d").putImageData(image, 0, 0);
  }

  draw() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); }); }

  paint() {
    const { c, width, height } = fitCanvas(this.canvas);
    const theme = colours();
    LEFT = Math.round(4.3 * rem());
    BOTTOM = Math.round(1.6 * rem());
    c.font = fontOf();
    c.textBaseline = "middle";
    if (!this.data || !this.columns) {
      c.fillStyle = theme.faint;
      c.textAlign = "center";
      c.fillText("no step has been reported", width / 2, height / 2);
      return;
    }
    const count = this.cells.length;
    const w = width - LEFT - RIGHT, tall = height - BOTTOM;
    c.imageSmoothingEnabled = false;
    c.drawImage(this.image, LEFT, 0, w, tall);
    c.fillStyle = theme.faint;
    c.textAlign = "right";
    for (const tick of ticks(0, count - 1, tall / 40)) if (Number.isInteger(tick)) c.fillText(whole(this.data.ranks[tick]), LEFT - 8, Math.max(0.4 * rem(), ((tick + 0.5) / count) * tall));
    c.textAlign = "left";
    c.fillText("step", 2, height - BOTTOM * 0.35);
    c.textAlign = "center";
    for (const tick of ticks(0, this.columns - 1, w / 100)) if (Number.isInteger(tick)) c.fillText(whole(this.data.steps[tick]), LEFT + ((tick + 0.5) / this.columns) * w, height - BOTTOM * 0.35);
    for (const { x, tone } of this.marks) {
      const column = before(this.data.steps, x);
      if (x < this.data.steps[0] || x > this.data.steps[this.columns - 1]) continue;
      c.strokeStyle = theme[tone] ?? theme.bad;
      c.lineWidth = 1.5;
      c.setLineDash([3, 3]);
      c.beginPath();
      c.moveTo(LEFT + ((column + 1) / this.columns) * w, 0);
      c.lineTo(LEFT + ((column + 1) / this.columns) * w, tall);
      c.stroke();
      c.setLineDash([]);
    }
    for (const { index } of this.slow.slice(0, 8)) {
      const y = ((index + 0.5) / count) * tall, half = Math.max(3, tall / count / 2);
      c.fillStyle = theme.bad;
      c.beginPath();
      c.moveTo(LEFT - 1, y);
      c.lineTo(LEFT - 8, y - 5);
      c.lineTo(LEFT - 8, y + 5);
      c.fill();
      c.strokeStyle = theme.bad;
      c.lineWidth = 1.5;
      c.strokeRect(LEFT, y - half, w, half * 2);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      box, column: Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * this.columns),
      row: Math.floor(((event.clientY - box.top) / (box.height - BOTTOM)) * this.cells.length),
    };
  }

  point(event) {
    if (!this.columns) return;
    const { box, column, row } = this.at(event);
    const value = this.cells[row]?.[column];
    this.hint.hidden = value === undefined || value === null;
    if (this.hint.hidden) return;
    const ratio = this.ratio(row, column);
    this.hint.replaceChildren(h("strong", {}, this.name(row)), h("span", {}, `step ${whole(this.data.steps[column])}: ${span(value)}${this.own ? " of its own" : ""}`), h("span", {}, `${ratio.toFixed(2)}× the median`));
    this.hint.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 180)}px`;
    this.hint.style.top = `${event.clientY - box.top + 14}px`;
  }

  // What the colours mean.
  legend() {
    const [low, high] = this.range ?? [1, HIGHEST];
    const scale = heatScale();
    return [h("span", {}, `${low.toFixed(2)}× the median`), h("span", { class: "ramp", style: { background: `linear-gradient(90deg, ${scale.join(", ")})` } }), h("span", {}, `${high.toFixed(2)}×`)];
  }

  close() { this.watch.disconnect(); }
}

function shade(scale, share) {
  const t = Math.max(0, Math.min(1, share)) * (scale.length - 1);
  const i = Math.min(scale.length - 2, Math.floor(t));
  return scale[i].map((part, k) => Math.round(part + (scale[i + 1][k] - part) * (t - i)));
}
