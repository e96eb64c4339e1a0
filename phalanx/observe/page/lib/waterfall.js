// Where a step goes: what the plan predicted beside what was measured.
import { empty, h } from "./dom.js";
import { percent, span, words } from "./format.js";
import { colours } from "./theme.js";

const mean = (values) => {
  const known = (values ?? []).filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN;
};

export function bars(rows, total, format) {
  const theme = colours();
  let at = 0;
  return h("div", { class: "steps" }, rows.map(({ name, value, tone, whole, onpick }) => {
    const from = whole ? 0 : at;
    if (!whole) at += value;
    const part = h("div", { class: "part", style: { left: `${(100 * from) / total}%`, width: `${(100 * value) / total}%`, background: theme[tone] ?? theme.accent } });
    return h("div", { class: `step ${whole ? "total" : ""}`, "data-name": name },
      onpick ? h("button", { type: "button", onclick: onpick }, words(name)) : h("span", {}, words(name)),
      h("div", { class: "track", "aria-hidden": "true" }, part), h("span", { class: "value" }, ...format(value)));
  }));
}

export function waterfall(plan, series, job) {
  const measured = mean(series.mfu?.value.slice(-50));
  const seconds = job.step_seconds;
  if (!plan.prediction) return empty("No prediction", `${plan.problem}.${seconds ? ` A step takes ${span(seconds)}.` : ""}`);
  const parts = Object.entries(plan.prediction.parts).filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a);
  const total = Math.max(plan.prediction.step_seconds, seconds || 0);
  const show = (value) => [span(value), h("small", {}, percent(value / plan.prediction.step_seconds, 0))];
  const rows = parts.map(([name, value]) => ({ name, value, tone: name === "compute" || name.startsWith("matmul") ? "good" : "warn" }));
  rows.push({ name: "predicted step", value: plan.prediction.step_seconds, tone: "accent", whole: true });
  if (seconds) rows.push({ name: "measured step", value: seconds, tone: seconds > plan.prediction.step_seconds * 1.1 ? "bad" : "good", whole: true });
  return h("div", {}, bars(rows, total, show),
    h("p", { class: "muted small" }, `MFU: planned ${percent(plan.prediction.mfu)}${Number.isFinite(measured) ? `, measured ${percent(measured)}` : ""}.`));
}
