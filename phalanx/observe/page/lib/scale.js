const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]; // seconds

// Ticks that people read easily; ``steps`` to choose from, where they are not powers of ten.
export const clockTicks = (low, high, wanted) => ticks(low, high, wanted, CLOCK);
export function ticks(low, high, wanted, steps = []) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 1e-12 * Math.abs(high)) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [...steps, ...[1, 2, 2.5, 5, 10].map((each) => each * power)].find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

// Index of the last entry that is not above a value.
export function before(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Sharp lines whatever the density of the screen.
export function fitCanvas(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const w = Math.round(width * ratio), tall = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== tall) { canvas.width = w; canvas.height = tall; }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  return { c, width, height };
}

// Text on canvases grows with the page, up to wall screens.
export const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize) || 16;
export const fontOf = (size = 0.74, weight = 400) => `${weight} ${(size * rem()).toFixed(1)}px Inter, sans-serif`;
