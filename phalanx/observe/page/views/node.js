import { get } from "../lib/api.js";
import { card, empty, fill, figure, h, table } from "../lib/dom.js";
import { moment, span } from "../lib/format.js";
import { state } from "../lib/state.js";

export function nodeView({ rest: [name] }) {
  const now = h("span");
  const figures = { gpus: figure("GPUs free"), jobs: figure("jobs"), skew: figure("clock against the server"), place: figure("place") };
  const why = h("p");
  const history = table(["time", "state", "why"]);
  const none = empty("Nothing happened to it yet", "Its history is kept from the first change of state on.");
  const node = h("div", {},
    h("div", { class: "title" }, h("a", { href: "#/fleet" }, "Fleet"), h("span", { class: "faint" }, "/"), h("h1", {}, name), now, why),
    h("div", { class: "grid" }, card("Now", "", h("dl", { class: "figures" }, Object.values(figures))),
      card("History", "newest first", h("div", {}, none, history), "flush")));
  async function refresh() {
    const { node: known, history: changes } = await get(`/v1/nodes/${encodeURIComponent(name)}`);
    now.replaceChildren(state(known.state));
    why.textContent = known.why.text + (known.connected ? "" : "; its agent is not connected");
    figures.gpus.set(known.free_gpus, `of ${known.gpus}`, known.kind);
    figures.jobs.set(known.jobs.length ? known.jobs.map((job) => `#${job}`).join(" ") : "none");
    figures.skew.set(span(known.clock_skew_seconds));
    figures.place.set(known.leaf, "", `${known.pod}, rack ${known.rack || known.leaf}, partition ${known.partition}`);
    none.hidden = changes.length > 0;
    history.hidden = !changes.length;
    fill(history.body, changes.toReversed(), (change) => change.time_ns + change.state, (change) => h("tr", {},
      h("td", { class: "nowrap" }, moment(change.time_ns)), h("td", {}, state(change.state)), h("td", {}, change.why.text)));
  }
  return { node, refresh };
}
