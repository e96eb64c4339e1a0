// GPU time by bucket over time, stacked: each column is one bin of the timeline.
import { ORDER, tint } from "./buckets.js";
import { h } from "./dom.js";
import { clock, gpuHours, moment, percent, short, words } from "./format.js";
import { fitCanvas, fontOf, rem, ticks } from "./scale.js";
import { colours } from "./theme.js";

const FINE_NS = 60e9;
const DRAGGED = 12; // pixels from which on it was no click
const BOTTOM = 22, RIGHT = 8, TOP = 8;
let LEFT = 52; // as wide as its text

export class Stack {
  // onzoom: gets the two ends of a dragged stretch, in seconds; null: all of it again
  constructor(onpick, onzoom) {
    this.canvas = h("canvas", { role: "img", tabIndex: 0, "aria-label": "GPU time by bucket over time" });
    this.hint = h("div", { class: "hint", hidden: true });
    this.node = h("div", { class: "chart tall" }, this.canvas, this.hint);
    this.canvas.stack = this;
    this.bins = [];
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.hint.hidden = true; });
    this.canvas.addEventListener("pointerdown", (event) => { this.from = event.offsetX; });
    this.canvas.addEventListener("click", (event) => {
      if (this.bins.length && Math.abs(event.offsetX - this.from) > DRAGGED) return onzoom([this.from, event.offsetX].sort((a, b) => a - b).map((x) => Math.round(this.time(x) / 1e9)));
      const found = this.under(event);
      return found ? onpick(found.bin, found.name) : null;
    });
    this.canvas.addEventListener("keydown", (event) => { if (event.key === "Escape") onzoom(null); });
  }

  show(bins) {
    let empty = 0; // bins before this one in which nothing was settled
    this.bins = [];
    for (const bin of bins) {
      const parts = ORDER.map((name) => [name, Number(bin.buckets[name] ?? 0)]).filter(([, value]) => value > 0);
      const made = { from: bin.from * 1e9, to: bin.to * 1e9, parts, sum: parts.reduce((a, [, value]) => a + value, 0) };
      this.bins.push(made);
      if (parts.length) { this.spread(empty); empty = 0; } else { empty++; }
    }
    this.draw();
  }

  // When nothing happens nothing is settled: what is settled next is of all the time before it.
  spread(empty) {
    const last = this.bins[this.bins.length - 1];
    const parts = last.parts.map(([name, value]) => [name, value / (empty + 1)]);
    const sum = last.sum / (empty + 1);
    for (const bin of this.bins.slice(-empty - 1)) Object.assign(bin, { parts, sum });
  }

  draw() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); }); }

  paint() {
    const { c, width, height } = fitCanvas(this.canvas);
    const theme = colours();
    c.font = fontOf();
    c.fillStyle = theme.faint;
    if (!this.bins.length) { c.textAlign = "center"; c.fillText("no GPU time yet", width / 2, height / 2); return; }
    const first = this.bins[0].from, last = this.bins[this.bins.length - 1].to;
    // Height: GPUs, beside the most that there ever were. Time is settled when steps are reported,
    // seconds later: of a short while, shares say more than sums.
    const fine = this.bins[0].to - this.bins[0].from < FINE_NS;
    const most = fine ? 0 : Math.max(...this.bins.map((bin) => bin.sum / Math.max(1, bin.to - bin.from)));
    this.part = (bin, value) => (fine ? value / bin.sum : value / Math.max(1, bin.to - bin.from) / most) * this.tall;
    this.px = (time) => LEFT + ((time - first) / Math.max(1, last - first)) * (width - LEFT - RIGHT);
    this.time = (x) => first + ((x - LEFT) / (width - LEFT - RIGHT)) * Math.max(1, last - first);
    this.tall = height - BOTTOM - TOP;
    LEFT = Math.round(3.5 * rem());
    this.axis(c, theme, fine ? 1 : most, fine, width, height);
    for (const bin of this.bins) {
      const x = this.px(bin.from), full = this.px(bin.to) - x, w = Math.max(1, full > 8 ? full - 1 : full + 0.5);
      let y = height - BOTTOM;
      for (const [name, value] of bin.parts) {
        const part = this.part(bin, value);
        c.fillStyle = tint(name);
        c.fillRect(x, y - part, w, part + 0.5);
        y -= part;
      }
    }
    c.fillStyle = theme.faint;
    const days = new Date(first / 1e6).toDateString() !== new Date(last / 1e6).toDateString();
    c.textAlign = "left";
    c.fillText(days ? moment(first) : clock(first), LEFT, height - 6);
    c.textAlign = "right";
    c.fillText(days ? moment(last) : clock(last), width - RIGHT, height - 6);
  }

  // GPUs, or shares of them: what the height of a column means.
  axis(c, theme, most, shares, width, height) {
    c.strokeStyle = theme.line;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const value of ticks(0, most, this.tall / 60)) {
      const y = Math.round(height - BOTTOM - (value / most) * this.tall) + 0.5;
      c.beginPath();
      c.moveTo(LEFT, y);
      c.lineTo(width - RIGHT, y);
      c.stroke();
      c.fillText(shares ? percent(value, 0) : short(value), LEFT - 7, y);
    }
    c.textBaseline = "alphabetic";
    c.textAlign = "left";
    if (!shares) c.fillText("GPUs", 2, height - 6);
  }

  under(event) {
    if (!this.bins.length || !this.px) return null;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const bin = this.bins.find((each) => x >= this.px(each.from) && x < this.px(each.to));
    if (!bin) return null;
    let y = box.height - BOTTOM;
    for (const [name, value] of bin.parts) {
      y -= this.part(bin, value);
      if (event.clientY - box.top >= y) return { bin, name, value };
    }
    return { bin, name: "", value: 0 };
  }

  point(event) {
    const found = this.under(event);
    this.hint.hidden = !found;
    if (!found) return;
    const { bin, name } = found;
    this.hint.replaceChildren(h("strong", {}, `${clock(bin.from)} to ${clock(bin.to)}`),
      ...bin.parts.toReversed().map(([each, value]) => h("span", { class: each === name ? "strong" : "" }, `${words(each)} ${gpuHours(Math.round(value)).join(" ")}, ${percent(value / bin.sum, 0)}`)));
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left;
    this.hint.style.left = `${x > box.width * 0.6 ? Math.max(0, x - this.hint.offsetWidth - 14) : x + 14}px`;
  }

  close() { this.watch.disconnect(); }
}
