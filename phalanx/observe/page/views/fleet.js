// Every node at one look; what needs somebody is named beside the map.
import { get, status } from "../lib/api.js";
import { card, empty, fill, h, segmented } from "../lib/dom.js";
import { colourBy } from "../lib/fleetcolour.js";
import { FleetMap } from "../lib/fleetmap.js";
import { clock, counted, percent, whole } from "../lib/format.js";
import { state } from "../lib/state.js";

const TROUBLE = ["dead", "quarantined", "suspect", "draining"];

export function describe(fleet, node) {
  const name = fleet.states[fleet.state[node]];
  const job = fleet.job[node];
  const known = fleet.jobs.find((each) => each.id === job);
  const lines = [fleet.names[node], `${name}, ${fleet.free_gpus[node]} of ${fleet.gpus[node]} GPUs free`,
    `${fleet.leaves[fleet.leaf[node]]}, ${fleet.pods[fleet.pod[node]]}`];
  if (job > 0) lines.push(`job ${job}${known ? ` ${known.name}` : ""}`);
  if (fleet.slowness?.[node]) lines.push(`step ${fleet.slowness[node].toFixed(2)}× the median of its job`);
  if (fleet.temperature?.[node]) lines.push(`${Math.round(fleet.temperature[node])} °C`);
  return lines;
}

export function fleetView({ go, query }) {
  let fleet = null;
  let mode = query.get("colour") ?? "state";
  let only = query.get("only") ?? "";
  const tell = () => { go("fleet", { colour: mode === "state" ? "" : mode, only, find: find.value.trim() }, true); paint(); };
  const map = new FleetMap({
    pick: (node) => go(`node/${encodeURIComponent(fleet.names[node])}`),
    describe: (node) => describe(fleet, node),
  });
  const modes = segmented("Colour by", [["state", "Health"], ["job", "Job"], ["step", "Step time"], ["temperature", "Temperature"]], mode,
    (value) => { mode = value; tell(); });
  const find = h("input", { class: "field", type: "search", placeholder: "Find a node", "aria-label": "Find a node", value: query.get("find") ?? "", oninput: () => tell(),
    onkeydown: (event) => {
      if (event.key === "Enter" && map.found?.size) map.choose([...map.found][0], true);
    } });
  const legend = h("div", { class: "legend" });
  const mapCard = card("Nodes", "", h("div", {}, h("div", { class: "bar maptools" }, modes, h("div", { class: "find" }, find)), legend, map.node), "flush");
  const counts = h("div", { class: "counts" });
  const quiet = h("p", { class: "muted small" }, "Nothing worth telling yet."), well = h("p", { class: "muted small" }, "Every node is well.");
  const trouble = h("ul", { class: "list" });
  const troubleCard = card("Needs attention", "", h("div", {}, well, trouble));
  const notes = h("ul", { class: "list" });
  const nothing = empty("No nodes yet", h("p", {}, "Add one with ", h("code", {}, `phalanx agent --join ${location.origin}`)),
    h("p", {}, "or try it on this machine: ", h("code", {}, "phalanx up --nodes 4 --spares 1")));
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Fleet")), nothing,
    h("div", { class: "fleet" }, mapCard, h("div", { class: "side" }, card("States", "", counts), troubleCard, card("Lately", "", h("div", {}, quiet, notes)))));
  nothing.hidden = true;

  function paint() {
    if (!fleet) return;
    const colour = colourBy(mode, fleet);
    const text = find.value.trim().toLowerCase();
    const matches = (i) => (!text || fleet.names[i].toLowerCase().includes(text)) && (!only || fleet.states[fleet.state[i]] === only);
    map.found = text || only ? new Set([...fleet.names.keys()].filter(matches)) : null;
    map.show(fleet, colour);
    fill(legend, colour.legend, ([tint, name]) => tint + name,
      ([tint, name]) => h("span", { class: "key" }, h("span", { class: "swatch", style: { background: tint } }), name));
    legend.hidden = !colour.legend.length;
  }

  async function refresh() {
    const [next, { notices: lately }] = await Promise.all([get("/v1/fleet"), status()]);
    fleet = next;
    const count = fleet.names.length;
    nothing.hidden = count > 0;
    node.lastElementChild.hidden = count === 0;
    const held = fleet.gpus.reduce((sum, gpus, i) => sum + gpus - fleet.free_gpus[i], 0);
    const all = fleet.gpus.reduce((sum, gpus) => sum + gpus, 0);
    mapCard.note(`${counted(count, "node")} in ${counted(new Set(fleet.pod).size, "pod")}; ${whole(held)} of ${whole(all)} GPUs held${all ? ` (${percent(held / all, 0)})` : ""}`);
    paint();
    const each = fleet.states.map((name, i) => [name, fleet.state.reduce((sum, value) => sum + (value === i), 0)]);
    fill(counts, each.filter(([, n]) => n), ([name]) => name, ([name, n]) => h("button", {
      type: "button", "aria-pressed": String(only === name),
      onclick: (event) => {
        only = only === name ? "" : name;
        for (const other of counts.children) other.setAttribute("aria-pressed", String(Boolean(only) && other === event.currentTarget));
        tell();
      } }, state(name), h("span", { class: "count" }, whole(n))));
    const bad = TROUBLE.flatMap((name) => {
      const index = fleet.states.indexOf(name);
      return fleet.state.flatMap((value, i) => (value === index ? [[fleet.names[i], name]] : []));
    });
    troubleCard.note(bad.length > 12 ? `${whole(bad.length)} nodes` : "");
    well.hidden = bad.length > 0;
    fill(trouble, bad.slice(0, 12), ([name]) => name, ([name, what]) => h("li", {}, h("a", { href: `#/node/${encodeURIComponent(name)}` }, name), " ", state(what)));
    fill(notes, lately.slice(-6).reverse(), (n) => n.sequence + n.text, (n) => h("li", {},
      h("time", {}, clock(n.time_ns)), h("span", { class: n.level === "error" ? "bad" : "" }, n.text),
      n.job ? [" ", h("a", { href: `#/job/${n.job}` }, `job ${n.job}`)] : ""));
    quiet.hidden = lately.length > 0;
  }
  return { node, refresh, repaint: paint, close: () => map.close() };
}
