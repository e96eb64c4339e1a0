// Curves made comparable: smoothed, over steps, tokens, time or FLOPs, on axes that outliers do not flatten.
const LEAST = 12; // values below which nothing counts as an outlier
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// An exponential mean without the pull of its start; weight 0: as it is. Holes stay holes, and what lies
// outside of a range, where one is given, does not count.
export function smooth(values, weight, range = null) {
  if (!weight) return values;
  let mean = 0, scale = 1;
  return values.map((value) => {
    if (!known(value)) return value;
    if (range && scale < 1 && (value < range[0] || value > range[1])) return mean / (1 - scale);
    mean = weight * mean + (1 - weight) * value;
    scale *= weight;
    return mean / (1 - scale);
  });
}

export function quantile(sorted, share) {
  const at = share * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// The range in which values are: what lies far beyond the usual spread is left to the edge, and said.
export function usualRange(values) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  if (sorted.length < LEAST) return null;
  const low = quantile(sorted, 0.02), high = quantile(sorted, 0.98), room = 0.75 * (high - low);
  return high - low > 1e-9 * Math.abs(high) ? [Math.max(sorted[0], low - room), Math.min(sorted[sorted.length - 1], high + room)] : null;
}

// Where a step stands on another axis, between two that are known.
export function along(steps, values, step) {
  let low = 0, high = steps.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  const next = low + 1;
  if (step <= steps[0] || next >= steps.length || !known(values[next])) return values[low];
  return values[low] + ((step - steps[low]) / (steps[next] - steps[low])) * (values[next] - values[low]);
}

// The band of a matrix with a row a rank: least, middle and most of each column.
export function bandOf(rows, columns) {
  const band = { y: [], min: [], max: [] };
  for (let i = 0; i < columns; i++) {
    const sorted = rows.map((row) => row[i]).filter(known).sort((a, b) => a - b);
    band.y.push(sorted.length ? quantile(sorted, 0.5) : null);
    band.min.push(sorted[0] ?? null);
    band.max.push(sorted[sorted.length - 1] ?? null);
  }
  return band;
}
