// What a colour on the map means.
import { colours, seriesColour } from "./theme.js";

export const STATE_TONE = { healthy: "good", suspect: "warn", draining: "warn", quarantined: "bad", dead: "bad", spare: "other" };

// Dark to light, even for eyes that see no red (after viridis); the end that matters stands out.
const HEAT = { light: ["#dfe9ef", "#a9cbd8", "#6aa7bd", "#35759a", "#2b4b7c", "#bf3b1d"], dark: ["#20303a", "#2c5468", "#3f8096", "#68b3c0", "#c8e6d6", "#ff8361"] };
export const heatScale = () => HEAT[colours().dark ? "dark" : "light"];

export function colourBy(mode, fleet) {
  const theme = colours();
  if (mode === "job") return byJob(fleet, theme);
  if (mode === "step") return byValue(fleet, fleet.slowness ?? [], 1, 1.25, theme, (v) => `${v.toFixed(2)}×`, "of the median of its job");
  if (mode === "temperature") return byValue(fleet, fleet.temperature ?? [], 30, 95, theme, (v) => `${Math.round(v)} °C`, "hottest GPU");
  const palette = fleet.states.map((state) => theme[STATE_TONE[state]]);
  const idle = palette.push(theme.idle) - 1; // healthy, and nobody uses it
  const of = fleet.state.map((state, node) => (fleet.states[state] === "healthy" && !fleet.job[node] ? idle : state));
  const legend = [[theme.good, "healthy, in use"], [theme.idle, "healthy, free"], ...[["warn", "suspect or draining"], ["bad", "quarantined or dead"], ["other", "spare"]]
    .filter(([tone]) => fleet.state.some((state) => STATE_TONE[fleet.states[state]] === tone)).map(([tone, name]) => [theme[tone], name])];
  return { of, palette, legend };
}

// The largest jobs have hues of their own; the many small ones share three quiet shades.
const OWN = 8;
const QUIET = { light: ["#a8b3bf", "#bfb5a6", "#93a39a"], dark: ["#4d5964", "#5f574b", "#4a5a52"] };

function byJob(fleet, theme) {
  const sizes = new Map();
  for (const job of fleet.job) if (job > 0) sizes.set(job, (sizes.get(job) ?? 0) + 1);
  const jobs = [...sizes].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([job]) => job);
  const own = jobs.slice(0, OWN);
  const palette = [...own.map((_, i) => seriesColour(i)), ...QUIET[theme.dark ? "dark" : "light"], theme.idle, theme["strong-line"]];
  const index = new Map(jobs.map((job, i) => [job, i < OWN ? i : own.length + (job % 3)]));
  const of = fleet.job.map((job) => (job > 0 ? index.get(job) : own.length + (job < 0 ? 4 : 3)));
  const names = new Map(fleet.jobs.map((job) => [job.id, job.name]));
  const legend = own.map((job, i) => [palette[i], `${job} ${names.get(job) ?? ""}`]);
  if (jobs.length > OWN) legend.push([palette[own.length], `${jobs.length - OWN} smaller jobs`]);
  return { of, palette, legend: [...legend, [theme.idle, "no job"]] };
}

function byValue(fleet, values, low, high, theme, name, what) {
  const scale = heatScale();
  const palette = [...scale, theme["strong-line"]];
  const of = fleet.names.map((_, node) => {
    const value = values[node];
    if (value === null || value === undefined) return scale.length;
    return Math.max(0, Math.min(scale.length - 1, Math.floor(((value - low) / (high - low)) * (scale.length - 1))));
  });
  const legend = scale.map((colour, i) => [colour, name(low + ((high - low) * i) / (scale.length - 1))]);
  if (!values.some((value) => value !== null && value !== undefined)) return { of, palette, legend: [[theme["strong-line"], `${what}: no node reports it`]] };
  legend[0][1] = `${what}: ${legend[0][1]}`;
  return { of, palette, legend: [...legend, [theme["strong-line"], "not measured"]] };
}
