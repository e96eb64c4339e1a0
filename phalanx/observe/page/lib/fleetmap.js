// The fleet on a canvas: 12,500 nodes are redrawn in a few milliseconds, so nothing is cached.
import { h } from "./dom.js";
import { whole } from "./format.js";
import { layout } from "./layout.js";
import { paint } from "./mappaint.js";

const MOST_ZOOM = 60;

export class FleetMap {
  // pick(node) is called for a click or Enter; describe(node) gives the lines of the hint.
  constructor({ pick, describe }) {
    this.pick = pick;
    this.describe = describe;
    this.canvas = h("canvas", { class: "map", tabIndex: 0, role: "application" });
    this.hint = h("div", { class: "hint", role: "status", hidden: true });
    this.node = h("div", { class: "mapbox" }, this.canvas, this.hint, this.buttons());
    this.canvas.map = this;
    this.fleet = null;
    this.zoom = 1;
    this.offset = [0, 0];
    this.chosen = -1;
    this.found = null; // nodes that a search matched
    this.draws = 0;
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.canvas);
    this.pointers = new Map();
    this.listen();
  }

  buttons() {
    const button = (text, label, act) => h("button", { type: "button", class: "plain", "aria-label": label, onclick: act }, text);
    return h("div", { class: "mapbuttons" },
      button("+", "Zoom in", () => this.zoomBy(1.6)), button("−", "Zoom out", () => this.zoomBy(1 / 1.6)),
      button("⤢", "Show all", () => this.fit()));
  }

  // colour: { of: Int16Array|array of palette index per node, palette: [css], shape: state index per node }
  show(fleet, colour) {
    const fresh = !this.fleet || fleet.names.length !== this.fleet.names.length;
    this.fleet = fleet;
    this.colour = colour;
    this.canvas.setAttribute("aria-label",
      `Map of ${whole(fleet.names.length)} nodes. Arrow keys choose a node, Enter opens it, plus and minus zoom, zero shows all.`);
    if (fresh || !this.places) this.arrange();
    this.draw();
  }

  arrange() {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!this.fleet || !width) return;
    this.places = layout(this.fleet, width / height);
    this.fit(false);
  }

  fit(draw = true) {
    if (!this.places) return;
    const { width, height } = this.canvas.getBoundingClientRect();
    const least = Math.min((width - 16) / this.places.width, (height - 16) / this.places.height);
    this.unit = Math.min(least, Math.max(90, Math.min(170, width / 7))); // a handful of nodes need not fill a wall
    this.zoom = 1;
    this.offset = [(width - this.places.width * this.unit) / 2, Math.max(8, (height - this.places.height * this.unit) / 2)];
    if (draw) this.draw();
  }

  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = Math.min(devicePixelRatio || 1, 2);
    if (!width || (this.canvas.width === Math.round(width * ratio) && this.canvas.height === Math.round(height * ratio))) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.ratio = ratio;
    this.arrange();
    this.draw(true);
  }

  draw(now = false) {
    if (now) { this.paint(); return; }
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); });
  }

  paint() {
    if (!this.places || !this.canvas.width) return;
    paint(this);
    this.draws++;
  }

  scale() { return this.unit * this.zoom; }

  zoomBy(factor, at) {
    const { width, height } = this.canvas.getBoundingClientRect();
    const [px, py] = at ?? [width / 2, height / 2];
    const next = Math.min(MOST_ZOOM, Math.max(0.5, this.zoom * factor));
    const change = next / this.zoom;
    this.offset = [px - (px - this.offset[0]) * change, py - (py - this.offset[1]) * change];
    this.zoom = next;
    this.draw();
  }

  panBy(dx, dy) {
    this.offset = [this.offset[0] + dx, this.offset[1] + dy];
    this.draw();
  }

  at([px, py]) {
    if (!this.places) return -1;
    const scale = this.scale();
    const x = (px - this.offset[0]) / scale, y = (py - this.offset[1]) / scale;
    const { x: xs, y: ys } = this.places;
    for (let node = 0; node < xs.length; node++) {
      if (x >= xs[node] && x < xs[node] + 1 && y >= ys[node] && y < ys[node] + 1) return node;
    }
    return -1;
  }

  choose(node, reveal = false) {
    this.chosen = node;
    if (node < 0) { this.hint.hidden = true; this.draw(); return; }
    if (reveal) this.reveal(node);
    const scale = this.scale();
    const { width } = this.canvas.getBoundingClientRect();
    const x = this.offset[0] + (this.places.x[node] + 0.5) * scale, y = this.offset[1] + (this.places.y[node] + 1) * scale;
    this.hint.replaceChildren(...this.describe(node).map((line, i) => h(i ? "span" : "strong", {}, line)));
    this.hint.hidden = false;
    this.hint.style.left = `${Math.min(Math.max(8, x - 90), Math.max(8, width - 240))}px`;
    this.hint.style.top = `${y + 8}px`;
    this.draw();
  }

  reveal(node) {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (this.scale() < 14) this.zoom *= 14 / this.scale();
    const scale = this.scale();
    const x = this.offset[0] + this.places.x[node] * scale, y = this.offset[1] + this.places.y[node] * scale;
    if (x < 0 || y < 0 || x + scale > width || y + scale > height) {
      this.offset = [width / 2 - (this.places.x[node] + 0.5) * scale, height / 2 - (this.places.y[node] + 0.5) * scale];
    }
  }

  step(dx, dy) {
    const { x, y, order } = this.places;
    if (this.chosen < 0) return this.choose(order[0], true);
    let best = -1, least = Infinity;
    for (const node of order) {
      const ax = x[node] - x[this.chosen], ay = y[node] - y[this.chosen];
      const ahead = ax * dx + ay * dy, aside = Math.abs(ax * dy) + Math.abs(ay * dx);
      if (ahead > 0.01 && ahead + 3 * aside < least) { least = ahead + 3 * aside; best = node; }
    }
    if (best >= 0) this.choose(best, true);
    return best;
  }

  listen() {
    const canvas = this.canvas;
    const where = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)), where(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, where(event));
      this.moved = 0;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = where(event);
      const before = this.pointers.get(event.pointerId);
      if (!before) {
        const node = this.at(now);
        if (node !== this.chosen) this.choose(node);
        canvas.style.cursor = node >= 0 ? "pointer" : "grab";
        return;
      }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const [, other] = others[0];
        const was = Math.hypot(before[0] - other[0], before[1] - other[1]), is = Math.hypot(now[0] - other[0], now[1] - other[1]);
        this.zoomBy(is / Math.max(was, 1), [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
      } else {
        this.panBy(now[0] - before[0], now[1] - before[1]);
      }
      this.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
      this.pointers.set(event.pointerId, now);
    });
    const up = (event) => {
      const single = this.pointers.size === 1;
      this.pointers.delete(event.pointerId);
      if (event.type !== "pointerup" || !single || this.moved > 5) return;
      const node = this.at(where(event));
      if (node >= 0) this.pick(node);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => { if (!this.pointers.size) this.choose(-1); });
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const { key } = event;
      if (!this.places) return;
      if (steps[key]) this.step(...steps[key]);
      else if (key === "Enter" && this.chosen >= 0) this.pick(this.chosen);
      else if (key === "+" || key === "=") this.zoomBy(1.4);
      else if (key === "-") this.zoomBy(1 / 1.4);
      else if (key === "0") this.fit();
      else if (key === "Escape") this.choose(-1);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  close() { this.watch.disconnect(); }
}
