// What a colour on the map means.
import { colours, seriesColour } from "./theme.js";

export const STATE_TONE = { healthy: "good", suspect: "warn", draining: "warn", quarantined: "bad", dead: "bad", spare: "other" };

// Dark to light, even for eyes that see no red (after viridis); the end that matters stands out.
const HEAT = { light: ["#dfe9ef", "#a9cbd8", "#6aa7bd", "#35759a", "#2b4b7c", "#bf3b1d"], dark: ["#20303a", "#2c5468", "#3f8096", "#68b3c0", "#c8e6d6", "#ff8361"] };
export const heatScale = () => HEAT[colours().dark ? "dark" : "light"];

export function colourBy(mode, fleet) {
  const theme = colours();
  if (mode === "job") return byJob(fleet, theme);
  if (mode === "step") return byValue(fleet, fleet.slowness ?? [], 1, 1.25, theme, (v) => `${v.toFixed(2)}× the median`);
  if (mode === "temperature") return byValue(fleet, fleet.temperature ?? [], 30, 95, theme, (v) => `${Math.round(v)} °C`);
  const palette = fleet.states.map((state) => theme[STATE_TONE[state]]);
  const idle = palette.push(theme.idle) - 1; // healthy, and nobody uses it
  const of = fleet.state.map((state, node) => (fleet.states[state] === "healthy" && !fleet.job[node] ? idle : state));
  return { of, palette, legend: [] };
}

function byJob(fleet, theme) {
  const numbers = [...new Set(fleet.job.filter((job) => job > 0))].sort((a, b) => a - b);
  const index = new Map(numbers.map((job, i) => [job, i]));
  const palette = [...numbers.map((_, i) => seriesColour(i)), theme.idle, theme["strong-line"]];
  const none = numbers.length, hidden = none + 1;
  const of = fleet.job.map((job) => (job > 0 ? index.get(job) : job < 0 ? hidden : none));
  return { of, palette, legend: numbers.slice(0, 12).map((job, i) => [palette[i], `job ${job}`]) };
}

function byValue(fleet, values, low, high, theme, name) {
  const scale = heatScale();
  const palette = [...scale, theme["strong-line"]];
  const of = fleet.names.map((_, node) => {
    const value = values[node];
    if (value === null || value === undefined) return scale.length;
    return Math.max(0, Math.min(scale.length - 1, Math.floor(((value - low) / (high - low)) * (scale.length - 1))));
  });
  const legend = scale.map((colour, i) => [colour, name(low + ((high - low) * i) / (scale.length - 1))]);
  return { of, palette, legend: [...legend, [theme["strong-line"], "not measured"]] };
}
