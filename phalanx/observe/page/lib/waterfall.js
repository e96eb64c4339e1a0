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

// From the peak of the devices down to MFU: each row takes its share of a step. What cannot be
// measured apart (kernels below peak, bubble, host) is left of the measured step as one rest.
const PREDICTED = [
  ["useful work at peak (MFU)", (p) => p.mfu * p.step_seconds], ["kernels below peak", (p) => p.parts.matmul + p.parts.attention - p.mfu * p.step_seconds],
  ["elementwise", (p) => p.parts.elementwise], ["recompute", (p) => p.parts.recompute],
  ["communication", (p) => p.parts.tensor + p.parts.context + p.parts.expert + p.parts.data + p.parts.pipeline], ["bubble", (p) => p.parts.bubble],
  ["optimizer", (p) => p.parts.optimizer], ["offload", (p) => p.parts.offload], ["host", (p) => p.parts.host], ["straggler", (p) => p.parts.straggler],
];
const MEASURED = [["communication", "exposed_communication_seconds"], ["optimizer", "optimizer_seconds"], ["waiting for data", "data_seconds"], ["snapshot", "snapshot_seconds"]];
const PASSES = [["forward", "forward_seconds"], ["backward", "backward_seconds"]]; // communication within them is told apart
const REST = "kernels, bubble, host";
const RECENT = 50; // steps that measured parts are the mean of
export const MEASURED_NAMES = [...[...MEASURED, ...PASSES].map(([, name]) => name), "step_seconds"];

const recent = (series, name) => mean(series[name]?.value.slice(-RECENT));

function measuredShares(series) {
  const step = recent(series, "step_seconds");
  if (!(step > 0)) return null;
  const found = new Map();
  const mfu = recent(series, "mfu");
  const passes = PASSES.map(([name, key]) => [name, recent(series, key)]).filter(([, value]) => value > 0);
  const both = passes.reduce((sum, [, value]) => sum + value, 0);
  const hidden = both > 0 ? Math.min(both, recent(series, "exposed_communication_seconds") || 0) : 0;
  if (mfu > 0) found.set(PREDICTED[0][0], mfu);
  else for (const [name, value] of passes) found.set(name, (value * (1 - hidden / both)) / step);
  for (const [name, key] of MEASURED) {
    const value = recent(series, key);
    if (value > 0) found.set(name, value / step);
  }
  const known = [...found.values()].reduce((a, b) => a + b, 0);
  if (known < 1) found.set(mfu > 0 ? REST : "rest", 1 - known);
  return { step, found };
}

export function waterfall(plan, series) {
  const predicted = plan.prediction ? new Map(PREDICTED.map(([name, of]) => [name, Math.max(0, of(plan.prediction)) / plan.prediction.step_seconds])) : null;
  const measured = measuredShares(series);
  if (!predicted && !measured) return empty("No step", "Where a step goes, as planned and as measured.");
  const names = [...new Set([...(predicted?.keys() ?? []), ...(measured?.found.keys() ?? [])])].filter((name) => (predicted?.get(name) ?? 0) + (measured?.found.get(name) ?? 0) > 0.001);
  let planAt = 0, madeAt = 0;
  const piece = (from, share, kind) => (share ? h("div", { class: `part ${kind}`, style: { left: `${100 * from}%`, width: `${100 * share}%` } }) : "");
  const rows = names.map((name) => {
    const one = predicted?.get(name) ?? 0, other = measured?.found.get(name) ?? 0;
    const made = h("div", { class: "step", "data-name": name }, h("span", {}, name),
      h("div", { class: predicted ? "track two" : "track", "aria-hidden": "true" }, piece(planAt, one, "planned"), piece(madeAt, other, "made")),
      h("span", { class: "value" }, predicted ? h("small", {}, one ? percent(one) : "–") : "", " ", other ? percent(other) : "–"));
    planAt += one;
    madeAt += other;
    return made;
  });
  const seconds = [plan.prediction ? `planned ${span(plan.prediction.step_seconds)} a step` : "", measured ? `measured ${span(measured.step)}` : ""].filter(Boolean).join(", ");
  return h("div", {}, h("div", { class: "legend" }, predicted ? h("span", { class: "key" }, h("span", { class: "swatch planned" }), "planned") : "", h("span", { class: "key" }, h("span", { class: "swatch made" }), "measured")),
    h("div", { class: "steps" }, rows), h("p", { class: "muted small" }, `${seconds}.${plan.problem ? ` No plan to compare with: ${plan.problem}.` : ""}`));
}
