// Where the money went: every GPU-nanosecond is in exactly one bucket.
import { get, getExact } from "../lib/api.js";
import { BUCKETS, meaning, ordered, tint, total } from "../lib/buckets.js";
import { card, empty, fill, figure, h, setText, table } from "../lib/dom.js";
import { dollars, gpuHours, percent, whole, words } from "../lib/format.js";
import { Stack } from "../lib/stack.js";
import { usageCard } from "../lib/usage.js";

const MOST_BINS = 120, LEAST_BINS = 4, SAMPLE_SECONDS = 12;

const rangeOf = (query) => { const [from, to] = [Number(query.get("from")), Number(query.get("to"))]; return to > from ? [from, to] : null; };

export function goodputView({ go, query }) {
  let scope = query.get("job") ? `job:${query.get("job")}` : query.get("team") ? `team:${query.get("team")}` : "fleet";
  let bins = MOST_BINS;
  let range = rangeOf(query); // seconds from and to; null: all there is
  const address = () => { const [kind, name] = scope.split(/:(.*)/); return { ...(kind === "fleet" ? {} : { [kind]: name }), ...(range ? { from: range[0], to: range[1] } : {}) }; };
  const zoom = (wanted) => { range = wanted; bins = MOST_BINS; go("goodput", address(), true); return refresh(); };
  const pick = h("select", { class: "pick", "aria-label": "Whose time", onchange: () => {
    scope = pick.value;
    bins = MOST_BINS;
    go("goodput", address(), true);
    refresh();
  } });
  const figures = { spent: figure("GPU time"), money: figure("price"), goodput: figure("goodput"), kept: figure("of held time, in steps that were kept") };
  const stack = new Stack((bin, name) => events(name, bin.to), zoom);
  const everything = h("button", { class: "button", type: "button", hidden: true, onclick: () => zoom(null) }, "All of the time");
  const legend = h("div", { class: "legend" });
  const fall = h("div", { class: "steps" });
  const sum = h("p", { class: "muted small", role: "status" });
  const causes = table(["cause", ["GPU time", "num"], ["price", "num"], "in"]);
  const causesCard = card("By cause", "what the losses came from", causes, "flush");
  const teams = table(["team", ["GPU time", "num"], ["price", "num"], ["goodput", "num"]]);
  const teamsCard = card("By team", "", teams, "flush");
  const nothing = empty("No GPU time yet", h("p", {}, "The ledger begins with the first node: ", h("code", {}, `phalanx agent --join ${location.origin}`)));
  const usage = usageCard();
  const timeCard = card("Over time", "GPUs by what they did; a click shows the events of that time, a dragged stretch fills the picture", h("div", {}, stack.node, h("div", { class: "bar" }, legend, everything)));
  const grid = h("div", { class: "grid" },
    card("Sum", "", h("dl", { class: "figures" }, Object.values(figures))), timeCard,
    card("From what was paid to what was computed", "", h("div", {}, fall, sum), "half"), h("div", { class: "half grid" }, causesCard, teamsCard, usage.node));
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Goodput"), pick), nothing, grid);
  const events = (bucket, at = "") => go("events", { bucket, at: at ? Math.round(at) : "", job: scope.startsWith("job:") ? scope.slice(4) : "" });

  async function refresh() {
    const [kind, name] = scope.split(/:(.*)/), asked = `bins=${bins}${range ? `&from=${range[0]}&to=${range[1]}` : ""}`;
    everything.hidden = !range;
    const [fleet, { teams: groups }, { jobs }] = await Promise.all([get(`/v1/ledger/timeline?${asked}`), getExact("/v1/ledger"), get("/v1/jobs?state=all&limit=200&newest=true")]);
    choices(groups, jobs);
    await usage.refresh();
    const found = kind === "job" ? await get(`/v1/jobs/${name}/ledger?${asked}`) : kind === "team" ? await get(`/v1/ledger/timeline?${asked}&team=${encodeURIComponent(name)}`) : fleet;
    if (sparse(found.timeline)) return refresh();
    const price = fleet.gpu_hours ? fleet.dollars / fleet.gpu_hours : 0;
    const all = BigInt(found.allocation_gpu_ns);
    const cost = (ns) => dollars((Number(BigInt(ns) / 1_000_000n) / 3.6e6) * price);
    nothing.hidden = all > 0n;
    grid.hidden = all === 0n;
    figures.spent.set(...gpuHours(all));
    figures.money.set(dollars(found.dollars), "", `at ${dollars(price)} a GPU-hour`);
    figures.goodput.set(percent(found.goodput), "", "of all GPU time, computing steps that were kept");
    figures.kept.set(percent(found.ettr));
    stack.show(found.timeline);
    const parts = ordered(found.buckets);
    fill(legend, parts.map(([bucket]) => bucket), (bucket) => bucket, (bucket) => h("span", { class: "key", title: meaning(bucket) }, h("span", { class: "swatch", style: { background: tint(bucket) } }), words(bucket)));
    waterfallOf(parts, all, cost);
    const added = total(found.buckets);
    sum.className = added === all ? "muted small" : "bad small";
    setText(sum, added === all ? `The buckets sum to the allocation exactly: ${whole(all)} GPU-nanoseconds.` : `The buckets sum to ${whole(added)}, the allocation is ${whole(all)} GPU-nanoseconds.`);
    if (added === all && !Number(found.buckets.exposed_communication ?? 0)) sum.append(" Productive time is whole steps: no plan says how much of them is communication.");
    sum.dataset.sum = String(added);
    sum.dataset.allocation = String(all);
    const rows = Object.entries(found.by_cause ?? {}).map(([cause, buckets]) => [cause, String(total(buckets)), Object.keys(buckets)]).sort((a, b) => (BigInt(b[1]) > BigInt(a[1]) ? 1 : -1));
    causesCard.hidden = !rows.length;
    fill(causes.body, rows, ([cause]) => cause, ([cause, ns, names]) => h("tr", {},
      h("td", {}, h("a", { href: `#/events?cause=${encodeURIComponent(cause)}` }, words(cause))), h("td", { class: "num" }, gpuHours(ns).join(" ")),
      h("td", { class: "num" }, cost(ns)), h("td", { class: "muted" }, names.map(words).join(", "))));
    teamsCard.hidden = !Object.keys(groups).length || kind !== "fleet";
    fill(teams.body, Object.entries(groups), ([team]) => team, ([team, share]) => h("tr", {}, h("td", {}, h("a", { href: `#/goodput?team=${encodeURIComponent(team)}` }, team)),
      h("td", { class: "num" }, gpuHours(share.gpu_ns).join(" ")), h("td", { class: "num" }, cost(share.gpu_ns)), h("td", { class: "num" }, percent(share.steps_known ? share.goodput_ppm / 1e6 : NaN))));
  }

  function waterfallOf(parts, all, cost) {
    const share = (value) => Number((value * 1_000_000n) / (all || 1n)) / 1e4;
    let left = 100;
    const lost = parts.filter(([name]) => name !== "productive");
    const work = parts.find(([name]) => name === "productive")?.[1] ?? 0n;
    const row = (name, value, from, klass = "") => h("div", { class: `step ${klass}`, "data-name": name, "data-ns": String(value), title: meaning(name) },
      BUCKETS[name] ? h("button", { type: "button", onclick: () => events(name) }, words(name)) : h("span", {}, name),
      h("div", { class: "track", "aria-hidden": "true" }, h("div", { class: "part", style: { left: `${from}%`, width: `${share(value)}%`, background: BUCKETS[name] ? tint(name) : "var(--strong-line)" } })),
      h("span", { class: "value" }, gpuHours(value).join(" "), h("small", {}, cost(value))));
    const rows = [["paid for", all, 0, "total"]];
    for (const [name, value] of lost.toSorted((a, b) => (b[1] > a[1] ? 1 : -1))) { left -= share(value); rows.push([name, value, Math.max(0, left), ""]); }
    rows.push(["productive", work, 0, "total"]);
    fill(fall, rows.map(([name, value, from, klass]) => [name, String(value), from, klass]), ([name]) => name, ([name, value, from, klass]) => row(name, BigInt(value), from, klass));
  }

  // The ledger is sampled every few seconds: of a short time, fewer and wider bins are asked for.
  function sparse(timeline) {
    if (!timeline.length) return false;
    const seconds = timeline[timeline.length - 1].to - timeline[0].from;
    const wanted = Math.max(LEAST_BINS, Math.min(MOST_BINS, Math.floor(seconds / SAMPLE_SECONDS)));
    if (wanted > bins * 0.5 && wanted < bins * 2) return false;
    bins = wanted;
    return true;
  }

  function choices(groups, jobs) {
    const options = [["fleet", "The fleet"], ...Object.keys(groups).map((team) => [`team:${team}`, `Team ${team}`]),
      ...jobs.toReversed().slice(0, 200).map((job) => [`job:${job.id}`, `Job ${job.id} ${job.name}`])];
    fill(pick, options, ([value]) => value, ([value, text]) => h("option", { value }, text));
    pick.value = scope;
  }
  return { node, refresh, repaint: refresh, close: () => stack.close(), moved: (next) => {
    const wanted = next.get("job") ? `job:${next.get("job")}` : next.get("team") ? `team:${next.get("team")}` : "fleet";
    if (wanted !== scope) bins = MOST_BINS;
    scope = wanted;
    range = rangeOf(next);
  } };
}
