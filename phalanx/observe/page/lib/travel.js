// The slider through the fleet's past, with marks where something happened.
import { h, setText } from "./dom.js";
import { clock, moment } from "./format.js";
import { colours } from "./theme.js";

const STEPS = 1000;

export class Travel {
  constructor(onmove) {
    this.range = h("input", { type: "range", min: 0, max: STEPS, value: STEPS, "aria-label": "Time", oninput: () => this.move() });
    this.marks = h("canvas", { "aria-hidden": "true" });
    this.first = h("span");
    this.when = h("strong", {}, "now");
    this.back = h("button", { class: "plain", type: "button", onclick: () => { this.range.value = STEPS; this.move(); }, hidden: true }, "Back to now");
    this.node = h("div", { class: "travel" },
      h("div", { class: "bar" }, h("span", { class: "muted" }, "The fleet at"), this.when, this.back),
      this.marks, this.range, h("div", { class: "ends" }, this.first, h("span", {}, "now")));
    this.onmove = onmove;
    this.at = 0; // 0: now
    this.times = [];
  }

  span(first, now) {
    this.from = first || now;
    this.to = now;
    setText(this.first, moment(this.from));
    if (this.at) this.range.value = String(Math.round(((this.at - this.from) / Math.max(1, this.to - this.from)) * STEPS));
    this.paint();
  }

  jump(at) {
    this.at = at;
    this.tell();
    if (this.from) this.span(this.from, this.to);
  }

  move() {
    const value = Number(this.range.value);
    this.at = value >= STEPS ? 0 : Math.round(this.from + ((this.to - this.from) * value) / STEPS);
    this.tell();
    this.onmove(this.at);
  }

  tell() {
    setText(this.when, this.at ? moment(this.at) : "now");
    this.back.hidden = !this.at;
    this.range.setAttribute("aria-valuetext", this.at ? clock(this.at) : "now");
  }

  paint() {
    const { width, height } = this.marks.getBoundingClientRect();
    if (!width || !this.from) return;
    this.marks.width = width * devicePixelRatio;
    this.marks.height = height * devicePixelRatio;
    const c = this.marks.getContext("2d");
    const theme = colours();
    c.scale(devicePixelRatio, devicePixelRatio);
    for (const [time, tone] of this.times) {
      const x = 8 + ((width - 16) * (time - this.from)) / Math.max(1, this.to - this.from);
      c.fillStyle = theme[tone] ?? theme["strong-line"];
      c.globalAlpha = tone ? 1 : 0.6;
      c.fillRect(x - 0.75, tone ? 2 : height * 0.55, 1.5, height);
    }
  }
}
