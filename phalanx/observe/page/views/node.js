// One node: what it is, what its devices do, and what became of it.
import { actionButton, nodeOrders, refusedTo } from "../lib/actions.js";
import { get, post, who } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { evidence } from "../lib/evidence.js";
import { card, empty, fill, figure, h, prose, table } from "../lib/dom.js";
import { clock, counted, moment, percent, quantity, short, span, whole, words } from "../lib/format.js";
import { state } from "../lib/state.js";

const share = (v, digits = 3) => percent(v, digits - 3);
const bytes = (v, digits) => quantity(v, "B", digits);
const rate = (v, digits) => quantity(v, "B/s", digits);
const count = (v) => whole(Math.round(v));
// Charts of the host, and of each GPU; one that has nothing to say is not shown. Counters of what
// should never happen are shown when it did.
const HOST = [
  ["Processors busy", share, [["cpu_utilization", "busy"]]], ["Load", short, [["load", "load"]]], ["Memory in use", bytes, [["memory_used_bytes", "memory"], ["swap_used_bytes", "swap"]]],
  ["Network", rate, [["network_receive_bytes_per_second", "in"], ["network_transmit_bytes_per_second", "out"]]],
  ["InfiniBand", rate, [["infiniband_receive_bytes_per_second", "in"], ["infiniband_transmit_bytes_per_second", "out"]]],
  ["Disk free", bytes, [["disk_free_bytes", "free"]]],
  ["Errors on links", count, [["network_errors", "network"], ["infiniband_errors", "InfiniBand"]], true], ["Out-of-memory kills", count, [["out_of_memory_kills", "kills"]], true],
];
const DEVICES = [
  ["GPUs busy", share, "gpu_utilization"], ["GPU temperature", (v) => `${Math.round(v)} °C`, "gpu_temperature_celsius"], ["GPU power", (v) => `${Math.round(v)} W`, "gpu_power_watts"],
  ["GPU memory", bytes, "gpu_memory_used_bytes"], ["SM clock", (v) => `${Math.round(v)} MHz`, "gpu_sm_clock_megahertz"],
  ["SMs active", share, "gpu_sm_activity"], ["Tensor cores active", share, "gpu_tensor_activity"], ["GPU memory busy", share, "gpu_dram_activity"],
  ["NVLink out", rate, "gpu_nvlink_transmit_bytes_per_second"], ["PCIe out", rate, "gpu_pcie_transmit_bytes_per_second"], ["PCIe in", rate, "gpu_pcie_receive_bytes_per_second"],
  ["Throttled (reasons)", count, "gpu_throttle_reasons", true], ["ECC errors, uncorrected", count, "gpu_ecc_uncorrected", true], ["ECC errors, corrected", count, "gpu_ecc_corrected", true],
  ["NVLink errors", count, "gpu_nvlink_errors", true], ["PCIe replays", count, "gpu_pcie_replays", true],
];

export function nodeView({ rest: [name], query, go }) {
  const now = h("span");
  const figures = { gpus: figure("GPUs free"), jobs: figure("jobs"), skew: figure("clock against the server"), place: figure("place"), burnIn: figure("burn-in") };
  const why = h("p");
  const acts = h("div", { class: "acts" });
  const history = table(["time", "state", "why"]);
  const facts = table(["fact", "value", "source"]), unread = h("p", { class: "faint" });
  const factCard = card("Description", "by its agent", h("div", {}, facts, unread), "flush");
  factCard.hidden = true;
  const drift = table(["what", "here", "most nodes of its kind", "since"]), driftNote = h("p", { class: "faint" });
  const driftCard = card("Drift", "where it differs from the majority", h("div", {}, drift, driftNote), "flush");
  const none = empty("Nothing happened to it yet", "Its history is kept from the first change of state on.");
  const group = [];
  const findings = h("ul", { class: "list" });
  const findingCard = card("Findings", "newest first", findings);
  findingCard.hidden = true;
  const zoomed = (zoom) => go(`node/${encodeURIComponent(name)}`, { zoom: zoom ? zoom.map(Math.round).join(":") : "" }, true); // the address is the view
  const charts = [...HOST, ...DEVICES].map(([label, format, of, rare]) => {
    const chart = new Chart({ label, format, group, floor: [share, rate, count].includes(format) ? 0 : undefined, zoomed, x: "at", formatX: (seconds) => clock(seconds * 1e9) });
    const made = card(label, "", chart.node, "half curve");
    made.hidden = true;
    return { of, rare, chart, card: made };
  });
  const [from, to] = (query.get("zoom") ?? "").split(":").map(Number);
  if (to > from) for (const chart of group) chart.zoom = [from, to];
  const node = h("div", {},
    h("div", { class: "title" }, h("a", { href: "#/fleet" }, "Fleet"), h("span", { class: "faint" }, "/"), h("h1", {}, name), now, acts, why),
    h("div", { class: "grid" }, card("Now", "", h("dl", { class: "figures" }, Object.values(figures))),
      findingCard, driftCard, factCard, card("History", "newest first", h("div", {}, none, history), "flush"), ...charts.map((each) => each.card)));

  async function refresh() {
    const path = `/v1/nodes/${encodeURIComponent(name)}`;
    const [{ node: known, history: changes, description }, measured, found, differs, burnIn] = await Promise.all([
      get(path), get(`${path}/metrics`), get("/v1/findings?limit=500"), get(`/v1/drift?node=${encodeURIComponent(name)}`), get(`${path}/acceptance`)]);
    const { role } = (await who()).token;
    if (acts.key !== known.state + role) acts.replaceChildren(...nodeOrders(known, post, refresh).map((each) => actionButton(each, refusedTo(role, "admin"))));
    acts.key = known.state + role;
    const mine = found.findings.filter((each) => each.node === name && each.kind !== "incident").toReversed().slice(0, 12);
    findingCard.hidden = !mine.length;
    fill(findings, mine, (each) => each.time + each.kind, (each) => h("li", {}, h("div", { class: "finding warn" },
      h("div", {}, h("time", {}, clock(each.time * 1e9)), h("span", { class: "strong" }, each.sentence)), h("p", {}, prose(each.suggestion)), evidence(each))));
    now.replaceChildren(state(known.state));
    why.textContent = known.why.text + (known.connected ? "" : "; its agent is not connected");
    figures.gpus.set(known.free_gpus, `of ${known.gpus}`, known.kind);
    figures.jobs.set(known.jobs.length ? known.jobs.map((job) => `#${job}`).join(" ") : "none");
    figures.skew.set(span(known.clock_skew_seconds));
    figures.place.set(known.leaf, "", `${known.pod}, rack ${known.rack || known.leaf}, partition ${known.partition}`);
    const certified = burnIn.certificate?.certificate;
    const running = burnIn.ordered && !burnIn.ended;
    figures.burnIn.set(running ? "running" : certified?.outcome ?? "none", "", running ? burnIn.lines.at(-1) ?? "" : certified ? moment(certified.time_ns) : "");
    showDrift(differs, known.kind);
    const described = description?.facts ?? [];
    factCard.hidden = !described.length;
    fill(facts.body, described, (fact) => fact.key, (fact) => h("tr", {}, h("td", {}, words(fact.key)), h("td", {}, /(^|_)bytes$/.test(fact.key) ? bytes(Number(fact.value)) : String(fact.value)), h("td", {}, fact.source)));
    unread.textContent = [...(description?.warnings ?? []), ...(description?.unread ?? []).map((line) => `not read: ${line}`)].join("; ");
    none.hidden = changes.length > 0;
    history.hidden = !changes.length;
    fill(history.body, changes.toReversed(), (change) => change.time_ns + change.state, (change) => h("tr", {},
      h("td", { class: "nowrap" }, moment(change.time_ns)), h("td", {}, state(change.state)), h("td", {}, change.why.text)));
    for (const each of charts) {
      const found = seriesOf(measured, each);
      each.card.hidden = !found.length;
      each.chart.show(found);
    }
  }

  function showDrift({ differences, compared, silent }, kind) {
    const nodes = compared[kind] ?? 0, few = nodes < 3;
    drift.hidden = !differences.length;
    fill(drift.body, differences, (each) => each.aspect + each.key, (each) => h("tr", {},
      h("td", {}, `${each.aspect} ${words(each.key)}`),
      h("td", { class: "strong" }, each.aspect === "speed" ? `${share(each.share)} (${short(Number(each.value))})` : each.value),
      h("td", {}, `${each.aspect === "speed" ? short(Number(each.usual)) : each.usual} (${each.alike} of ${each.nodes})`),
      h("td", { class: "nowrap" }, moment(each.since_ns) + (each.before ? `, ${each.before} before` : ""))));
    driftNote.textContent = [
      few ? `${counted(nodes, "node")} of its kind: too few to tell who differs` : differences.length ? "" : `As most of ${nodes} nodes of its kind`,
      silent.length ? "its settings are not known yet" : ""].filter(Boolean).join("; ");
  }

  const told = (values) => values.some((value) => value !== null);
  function seriesOf({ host, gpus, time }, { of, rare }) {
    const all = Array.isArray(of)
      ? of.filter(([key]) => host[key]).map(([key, name]) => ({ name, x: host[key].time, y: host[key].value }))
      : (gpus[of] ?? []).map((y, index) => ({ name: `GPU ${index}`, x: time, y }));
    const found = all.filter(({ y }) => told(y));
    return rare && !found.some(({ y }) => y.some((value) => value > 0)) ? [] : found;
  }
  return { node, refresh, repaint: () => group.forEach((chart) => chart.draw()), close: () => group.forEach((chart) => chart.close()) };
}
