// Numbers, times and states in words.
const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => GROUPED.format(value);

export function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e18) return value.toExponential(1);
  for (const [limit, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((value / (unit === "k" ? 1e3 : limit)).toPrecision(digits))}${unit}`;
  }
  if (size >= 1000) return whole(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

// With a unit, which stands apart from the number, and its prefix with it: 25.3 GB.
export const quantity = (value, unit, digits = 3) => short(value, digits).replace(/[kMGTP]?$/, (prefix) => ` ${prefix}${unit}`);

export const percent = (share, digits = 1) => (Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : "–");

// Axes whose ticks would read the same ask for more digits than the usual three.
export const tickPercent = (share, digits = 3) => percent(share, digits - 2);

export function span(seconds, digits = 3) {
  const more = Math.max(0, digits - 3);
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `−${span(-seconds, digits)}`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(more)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1 + more)} s`;
  if (seconds < 100) return `${seconds.toFixed(more)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${(seconds / 60).toFixed(more)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

const pad = (value) => String(value).padStart(2, "0");
export function clock(ns, fine = false) {
  const date = new Date(Number(ns) / 1e6);
  const text = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return fine ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

export function moment(ns) {
  const date = new Date(Number(ns) / 1e6);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(ns) : `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock(ns)}`;
}

export const words = (name) => String(name).replaceAll("_", " ");
export const spaced = (name) => String(name).replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
export const counted = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

// Exact: GPU-nanoseconds arrive as integers beyond 2^53 and stay BigInt until they are shown.
export const HOUR_NS = 3600n * 10n ** 9n;
export function gpuHours(ns) {
  const seconds = Number(BigInt(ns) / 1_000_000n) / 1e3;
  const hours = seconds / 3600;
  if (hours >= 1e6) return [short(hours), "GPU-h"];
  if (hours >= 1000) return [whole(hours), "GPU-h"];
  if (hours >= 1) return [hours.toFixed(1), "GPU-h"];
  if (seconds >= 60) return [(seconds / 60).toFixed(1), "GPU-min"];
  return [seconds.toFixed(1), "GPU-s"];
}

export function dollars(amount) {
  if (!Number.isFinite(amount)) return "–";
  if (amount >= 1000) return `$${short(amount)}`;
  return `$${amount.toFixed(amount < 0.1 && amount > 0 ? 4 : 2)}`;
}

export const TONE = {
  running: "good", healthy: "good", done: "good", forming: "other", joining: "other", restoring: "other",
  pending: "muted", spare: "other", draining: "warn", suspect: "warn", quarantined: "bad", dead: "bad", failed: "bad",
  cancelled: "muted", settling: "warn",
};
export const GLYPH = {
  running: "●", healthy: "●", done: "✓", forming: "◐", joining: "◐", restoring: "◐", settling: "◐", pending: "○",
  spare: "◇", draining: "▽", suspect: "▲", quarantined: "■", dead: "✕", failed: "✕", cancelled: "–",
};
