// A finding's evidence in numbers, and its picture: the curves, the rank beside its peers, or the
// node's devices, around the moment it was found. Fetched when somebody opens it.
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { clock, short, span, spaced, whole } from "./format.js";
import { h } from "./dom.js";
import { medians } from "./heatmap.js";

const BEFORE = 600, AFTER = 120; // seconds around a finding
const HIDDEN = new Set(["sequence"]);

export function evidence({ job, node, rank, time, evidence: facts, picture }) {
  const told = Object.entries(facts ?? {}).filter(([name, value]) => !HIDDEN.has(name) && value !== null && value !== "");
  const shown = picture && Object.keys(picture).length > 0;
  if (!told.length && !shown) return "";
  const box = h("div", { class: "picture" });
  const made = h("details", { class: "evidence" }, h("summary", {}, "Evidence"),
    h("dl", {}, told.flatMap(([name, value]) => [h("dt", {}, named(name)), h("dd", {}, valued(name, value))])), box);
  made.addEventListener("toggle", () => {
    if (made.open && shown && !box.childElementCount) paint(box, { job, node, rank, time, picture }).catch((problem) => box.replaceChildren(h("p", { class: "muted small" }, problem.message)));
  });
  return made;
}

const named = (name) => spaced(name.replace(/_ppm$/, "").replaceAll("_", " "));

function valued(name, value) {
  if (name.endsWith("_ppm") || name === "ppm") return `${short(value / 1e4)} %`;
  if (name.endsWith("_seconds")) return span(value);
  if (typeof value === "number") return whole(value);
  return Array.isArray(value) || typeof value === "object" ? JSON.stringify(value) : String(value);
}

async function paint(box, { job, node, rank, time, picture }) {
  const window = `from=${time - BEFORE}&to=${time + AFTER}`;
  const mark = [{ x: time, tone: "bad", text: "found" }];
  const show = (label, series, format = short) => {
    const known = series.filter(({ y }) => y.some((value) => value !== null && value !== undefined));
    if (!known.length) return;
    const chart = new Chart({ label, format, x: "at", formatX: (seconds) => clock(seconds * 1e9) });
    box.append(h("p", { class: "muted small" }, label), chart.node);
    chart.show(known, mark);
  };
  if (picture.series && job) {
    const found = (await get(`/v1/jobs/${job}/metrics?names=${picture.series.join(",")}&points=300&${window}`)).series;
    for (const name of picture.series) if (found[name]) show(named(name), [{ name: named(name), x: found[name].time, y: found[name].value }], name.endsWith("_seconds") ? span : short);
  }
  if (picture.ranks && job) {
    const found = await get(`/v1/jobs/${job}/ranks?columns=200&${window}`);
    const row = found.rows === "rank" ? found.ranks.indexOf(rank) : found.ranks.findLastIndex((first) => first <= rank);
    const [middle] = medians(found.own_seconds, found.steps.length, 1);
    if (row >= 0) show("own work a step", [{ name: found.rows === "rank" ? `rank ${rank}` : found.nodes[row], x: found.time, y: found.own_seconds[row] }, { name: "the middle rank", x: found.time, y: [...middle] }], span);
  }
  if (picture.devices && node) {
    const found = await get(`/v1/nodes/${encodeURIComponent(node)}/metrics?${window}`);
    for (const name of picture.devices) {
      const own = found.host[name] ? [{ name: named(name), x: found.host[name].time, y: found.host[name].value }] : [];
      show(named(name), [...own, ...(found.gpus[name] ?? []).map((y, i) => ({ name: `GPU ${i}`, x: found.time, y }))]);
    }
  }
  if (!box.childElementCount) box.append(h("p", { class: "muted small" }, "nothing was measured around that moment"));
}
