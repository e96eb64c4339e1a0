// Curves over steps, with incidents marked on them. Charts of one group share crosshair and zoom.
import { h } from "./dom.js";
import { short, whole } from "./format.js";
import { usualRange } from "./curves.js";
import { before, clockTicks, fitCanvas, fontOf, rem, ticks } from "./scale.js";
import { colours, seriesColour } from "./theme.js";

const RIGHT = 12, TOP = 16, NAMED = 4;
let BOTTOM = 24; // as high as its text

export class Chart {
  // options: label, unit, format, group (array shared by charts), floor (lowest y), x: name of the x axis,
  // usual (whether outliers are left to the edge), zoomed (told of a new zoom)
  constructor(options) {
    this.options = { format: short, unit: "", group: [], x: "step", ...options };
    this.canvas = h("canvas", { role: "img", "aria-label": `${options.label}: no data yet`, tabIndex: 0 });
    this.hint = h("div", { class: "hint", hidden: true });
    this.node = h("div", { class: `chart ${options.tall ? "tall" : ""}` }, this.canvas, this.hint);
    this.canvas.chart = this;
    this.series = [];
    this.marks = [];
    this.lines = [];
    this.zoom = null;
    this.cursor = null;
    this.options.group.push(this);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
    this.listen();
  }

  // series: [{name, x, y, min?, max?, colour?, points?, faint?}]; marks: [{x, tone, text}]; lines: [{y, text}]
  show(series, marks = [], lines = []) {
    this.series = series.filter((each) => each.x.length);
    this.marks = marks;
    this.lines = lines.filter((line) => Number.isFinite(line.y));
    const told = this.series.map((each) => `${each.name} ${this.options.format(each.y.findLast((v) => v !== null && v !== undefined))}`);
    this.canvas.setAttribute("aria-label", `${this.options.label}: ${told.join(", ") || "no data yet"}; ${marks.length} incidents marked`);
    this.draw();
  }

  ranges() {
    let low = Infinity, high = -Infinity, from = Infinity, to = -Infinity;
    for (const { x } of this.series) { from = Math.min(from, x[0]); to = Math.max(to, x[x.length - 1]); }
    if (this.zoom) [from, to] = this.zoom;
    for (const { x, y, min, max } of this.series) {
      for (let i = 0; i < x.length; i++) {
        if (x[i] < from || x[i] > to) continue;
        const least = min?.[i] ?? y[i], most = max?.[i] ?? y[i];
        if (least === null || least === undefined) continue;
        if (least < low) low = least;
        if (most > high) high = most;
      }
    }
    const usual = this.options.usual ? usualRange(this.series.flatMap(({ x, y }) => y.filter((_, i) => x[i] >= from && x[i] <= to))) : null;
    this.beyond = usual !== null && (usual[0] > low || usual[1] < high);
    if (usual) [low, high] = usual;
    for (const { y } of this.lines) { low = Math.min(low, y); high = Math.max(high, y); }
    if (!(high > -Infinity)) [low, high] = [0, 1];
    if (this.options.floor !== undefined) low = Math.min(low, this.options.floor);
    if (high - low <= 1e-6 * Math.abs(high)) { high += Math.abs(high) * 0.1 || 1; low -= this.options.floor === undefined ? Math.abs(low) * 0.1 : 0; }
    const room = (high - low) * 0.06;
    return { from, to: to > from ? to : from + 1, low: this.options.floor === low ? low : low - room, high: high + room };
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); });
  }

  paint() {
    const { c, width, height } = fitCanvas(this.canvas);
    if (!width) return;
    const theme = colours();
    BOTTOM = Math.round(1.6 * rem());
    c.font = fontOf();
    if (!this.series.length) {
      c.fillStyle = theme.faint;
      c.textAlign = "center";
      c.fillText(this.options.waiting ?? "no data yet", width / 2, height / 2);
      return;
    }
    const range = this.ranges(), levels = this.levels(range, height);
    this.left = Math.max(Math.round(3.5 * rem()), ...levels.map(([, text]) => Math.ceil(c.measureText(text).width) + 9));
    const px = (x) => this.left + ((x - range.from) / (range.to - range.from)) * (width - this.left - RIGHT);
    const py = (y) => height - BOTTOM - ((y - range.low) / (range.high - range.low)) * (height - TOP - BOTTOM);
    this.px = px;
    this.at = (x) => range.from + ((x - this.left) / (width - this.left - RIGHT)) * (range.to - range.from);
    this.axes(c, theme, range, levels, px, py, width, height);
    c.save();
    c.beginPath();
    c.rect(this.left, 0, width - this.left - RIGHT, height - BOTTOM + 1);
    c.clip();
    this.series.forEach((each, i) => this.curve(c, each, each.colour ?? seriesColour(i), px, py));
    c.restore();
    for (const mark of this.marks) if (px(mark.x) >= this.left - 1 && px(mark.x) <= width - RIGHT + 1) this.mark(c, theme, mark, px(mark.x), height);
    for (const { y, text } of this.lines) {
      c.strokeStyle = theme.soft;
      c.setLineDash([4, 3]);
      line(c, this.left, py(y), width - RIGHT, py(y));
      c.setLineDash([]);
      c.fillStyle = theme.soft;
      c.textAlign = "right";
      c.fillText(text, width - RIGHT, py(y) - 4);
    }
    if (this.beyond) this.edges(c, theme, range, px, width, height);
    if (this.series.length > 1 && this.series.length <= NAMED && !this.options.unnamed) this.names(c, theme);
    if (this.cursor !== null) this.crosshair(c, theme, px, py, width, height);
  }

  // A few curves are named beside their colours; of many, the pointer says which is which.
  names(c, theme) {
    let x = this.left + 4;
    c.textAlign = "left";
    this.series.forEach((each, i) => {
      c.fillStyle = theme.surface; // a mark may stand there
      c.fillRect(x - 3, 0, 18 + c.measureText(each.name).width, TOP - 1);
      c.fillStyle = each.colour ?? seriesColour(i);
      c.fillRect(x, TOP - 11, 8, 8);
      c.fillStyle = theme.soft;
      c.fillText(each.name, x + 12, TOP - 4);
      x += 24 + c.measureText(each.name).width;
    });
  }

  // What lies beyond the axis is marked at the edge where it is.
  edges(c, theme, range, px, width, height) {
    c.fillStyle = theme.warn;
    for (const { x, y } of this.series) {
      y.forEach((value, i) => {
        if (value === null || value === undefined || (value <= range.high && value >= range.low) || px(x[i]) < this.left || px(x[i]) > width - RIGHT) return;
        const [at, edge, tip] = value > range.high ? [px(x[i]), TOP + 3, TOP - 4] : [px(x[i]), height - BOTTOM - 7, height - BOTTOM];
        c.beginPath();
        c.moveTo(at - 4, edge);
        c.lineTo(at + 4, edge);
        c.lineTo(at, tip);
        c.fill();
      });
    }
  }

  // Ticks with their texts; those that would read the same get more digits.
  levels(range, height) {
    const found = ticks(range.low, range.high, height / 34);
    const digits = [3, 4, 5, 6].find((each) => new Set(found.map((y) => this.options.format(y, each))).size === found.length) ?? 6;
    return found.map((y) => [y, this.options.format(y, digits)]);
  }

  axes(c, theme, range, levels, px, py, width, height) {
    c.strokeStyle = theme.line;
    c.fillStyle = theme.faint;
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const [y, text] of levels) {
      line(c, this.left, Math.round(py(y)) + 0.5, width - RIGHT, Math.round(py(y)) + 0.5);
      c.fillText(text, this.left - 7, py(y));
    }
    c.textBaseline = "alphabetic";
    c.textAlign = "center";
    const name = c.measureText(this.options.x).width + 6; // of the axis, in the corner
    for (const x of (this.options.x === "at" ? clockTicks : ticks)(range.from, range.to, width / 110)) {
      const text = (this.options.formatX ?? whole)(x), half = c.measureText(text).width / 2;
      const at = Math.min(px(x), width - half - 1);
      if (at - half > name) c.fillText(text, at, height - BOTTOM * 0.3);
    }
    c.textAlign = "left";
    c.fillText(this.options.x, 2, height - BOTTOM * 0.3);
    c.fillText(this.options.unit, 2, TOP - 6);
  }

  curve(c, { x, y, min, max, dash, points, faint }, colour, px, py) {
    c.lineJoin = "round";
    const alpha = faint ? 0.28 : 1;
    if (min && max) {
      c.globalAlpha = 0.16;
      c.fillStyle = colour;
      runs(y, (from, to) => {
        c.beginPath();
        for (let i = from; i < to; i++) c.lineTo(px(x[i]), py(max[i] ?? y[i]));
        for (let i = to - 1; i >= from; i--) c.lineTo(px(x[i]), py(min[i] ?? y[i]));
        c.fill();
      });
    }
    c.globalAlpha = alpha;
    c.strokeStyle = c.fillStyle = colour;
    c.lineWidth = faint ? 1 : 1.6;
    c.setLineDash(dash ? [5, 4] : []);
    runs(y, (from, to) => {
      c.beginPath();
      for (let i = from; i < to; i++) c.lineTo(px(x[i]), py(y[i]));
      c.stroke();
      // Few values far apart are shown where they are; so is one that stands alone.
      if (points || to - from === 1) for (let i = from; i < to; i++) c.fillRect(px(x[i]) - 2, py(y[i]) - 2, 4, 4);
    });
    c.setLineDash([]);
    c.globalAlpha = 1;
    c.lineWidth = 1;
  }

  mark(c, theme, mark, x, height) {
    c.strokeStyle = c.fillStyle = theme[mark.tone] ?? theme.bad;
    c.setLineDash([2, 3]);
    line(c, x, TOP - 4, x, height - BOTTOM);
    c.setLineDash([]);
    c.beginPath();
    c.moveTo(x, TOP - 2);
    c.lineTo(x - 5, 3);
    c.lineTo(x + 5, 3);
    c.fill();
  }

  crosshair(c, theme, px, py, width, height) {
    const x = px(this.cursor);
    if (x < this.left || x > width - RIGHT) { this.hint.hidden = true; return; }
    c.strokeStyle = theme["strong-line"];
    line(c, x, TOP, x, height - BOTTOM);
    const lines = [];
    this.series.forEach((each, i) => {
      if (each.faint) return;
      const index = before(each.x, this.cursor);
      const value = each.y[index];
      if (value === null || value === undefined) { lines.push([each.name, "not finite"]); return; }
      c.fillStyle = each.colour ?? seriesColour(i);
      c.beginPath();
      c.arc(px(each.x[index]), py(value), 3, 0, 7);
      c.fill();
      lines.push([each.name, `${this.options.format(value)} ${this.options.unit}`]);
    });
    const near = this.marks.filter((mark) => Math.abs(px(mark.x) - x) < 7);
    this.hint.replaceChildren(h("strong", {}, `${this.options.x} ${(this.options.formatX ?? whole)(this.cursor)}`),
      ...lines.map(([name, text]) => h("span", {}, `${name} ${text}`)), ...near.slice(0, 4).map((mark) => h("span", { class: "bad" }, mark.text)));
    this.hint.hidden = !this.own;
    this.hint.style.left = `${x > width * 0.6 ? Math.max(0, x - this.hint.offsetWidth - 12) : x + 12}px`;
  }

  listen() {
    const { canvas } = this;
    const each = (act) => this.options.group.forEach((chart) => { act(chart); chart.draw(); });
    const where = (event) => event.clientX - canvas.getBoundingClientRect().left;
    const point = (value, own) => each((chart) => { chart.cursor = value; chart.own = own && chart === this; if (value === null) chart.hint.hidden = true; });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.at) return;
      point(Math.round(this.at(where(event))), true);
    });
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("pointerdown", (event) => { this.from = this.at?.(where(event)); });
    canvas.addEventListener("pointerup", (event) => {
      if (this.from === undefined) return;
      const to = this.at(where(event));
      const [low, high] = [Math.min(this.from, to), Math.max(this.from, to)];
      if (Math.abs(this.px(high) - this.px(low)) > 12) { each((chart) => { chart.zoom = [low, high]; }); this.options.zoomed?.([low, high]); }
      this.from = undefined;
    });
    canvas.addEventListener("dblclick", () => { each((chart) => { chart.zoom = null; }); this.options.zoomed?.(null); });
    canvas.addEventListener("keydown", (event) => {
      const x = this.series[0]?.x;
      if (!x) return;
      const at = before(x, this.cursor ?? x[x.length - 1]);
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { point(x[Math.max(0, Math.min(x.length - 1, at + step))], true); event.preventDefault(); }
      if (event.key === "Escape") { point(null); each((chart) => { chart.zoom = null; }); this.options.zoomed?.(null); }
    });
    canvas.addEventListener("blur", () => point(null));
  }

  close() { this.watch.disconnect(); }
}

function line(c, x, y, toX, toY) {
  c.beginPath();
  c.moveTo(x, y);
  c.lineTo(toX, toY);
  c.stroke();
}

// Stretches without holes: a value that is not finite interrupts the curve.
function runs(values, act) {
  let from = -1;
  for (let i = 0; i <= values.length; i++) {
    const there = i < values.length && values[i] !== null && values[i] !== undefined;
    if (there && from < 0) from = i;
    if (!there && from >= 0) { act(from, i); from = -1; }
  }
}
