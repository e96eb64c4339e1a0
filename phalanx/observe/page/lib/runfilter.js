// A table of runs: filters in words (`state=done lr>1e-4 baseline`), groups, orders. No document here.
const CONDITION = /^([A-Za-z_][\w.]*)(>=|<=|!=|=|>|<)(.+)$/;
const FACTS = { name: (r) => r.name, user: (r) => r.user, team: (r) => r.team, state: (r) => r.state, job: (r) => r.job, tag: (r) => r.tags, tags: (r) => r.tags, created: (r) => r.created };

// The value of a run under a name: a fact, a number of its newest step, or a setting by its whole key or the end of it.
export function valueOf(run, key) {
  if (FACTS[key]) return FACTS[key](run);
  if (key in run.last) return run.last[key];
  if (key in run.settings) return run.settings[key];
  const full = Object.keys(run.settings).find((each) => each.endsWith(`.${key}`));
  return full ? run.settings[full] : undefined;
}

const COMPARE = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b };

function holds(run, key, sign, wanted) {
  const value = valueOf(run, key);
  if (sign === "=" || sign === "!=") {
    const same = (each) => String(each).toLowerCase() === wanted.toLowerCase() || (typeof each === "number" && each === Number(wanted));
    return (Array.isArray(value) ? value.some(same) : same(value ?? "")) === (sign === "=");
  }
  return typeof value === "number" && COMPARE[sign](value, Number(wanted));
}

// All words must fit; one without a sign fits names, people, states and tags.
export function matching(runs, text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  return runs.filter((run) => words.every((word) => {
    const [, key, sign, wanted] = word.match(CONDITION) ?? [];
    if (key) return holds(run, key, sign, wanted);
    return `${run.job} ${run.name} ${run.user} ${run.team} ${run.state} ${run.tags.join(" ")}`.toLowerCase().includes(word.toLowerCase());
  }));
}

export function ordered(runs, key, down) {
  const rank = (value) => (value === null || value === undefined || value === "" ? 1 : 0);
  return runs.toSorted((a, b) => {
    const [x, y] = [valueOf(a, key), valueOf(b, key)];
    if (rank(x) || rank(y)) return rank(x) - rank(y);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return down ? -order : order;
  });
}

// [[value, runs]] in the order in which values come.
export function grouped(runs, key) {
  if (!key) return [["", runs]];
  const groups = new Map();
  for (const run of runs) {
    const value = valueOf(run, key);
    const name = Array.isArray(value) ? value.join(", ") || "none" : String(value ?? "not said");
    if (groups.has(name)) groups.get(name).push(run);
    else groups.set(name, [run]);
  }
  return [...groups];
}
