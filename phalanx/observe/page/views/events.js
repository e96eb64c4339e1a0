// Every decision with its reason; the slider shows the fleet as it was.
import { get } from "../lib/api.js";
import { EVENTS } from "../lib/buckets.js";
import { card, empty, fill, h, segmented } from "../lib/dom.js";
import { eventNode, isCalm, toneOf } from "../lib/eventlist.js";
import { colourBy } from "../lib/fleetcolour.js";
import { FleetMap } from "../lib/fleetmap.js";
import { counted, moment, words } from "../lib/format.js";
import { Travel } from "../lib/travel.js";
import { describe } from "./fleet.js";

const SHOWN = 150, KEPT = 5000;
const WHICH = [["decisions", "With decisions"], ["trouble", "Trouble"], ["all", "All"]];

export function eventsView({ go, query }) {
  let fleet = null;
  let events = [];
  let older = []; // asked for when the slider goes further back than the newest events
  let which = WHICH.some(([name]) => name === query.get("show")) ? query.get("show") : query.get("bucket") ? "all" : WHICH[0][0];
  const job = Number(query.get("job") ?? 0);
  const cause = query.get("cause") ?? "";
  const bucket = query.get("bucket") ?? "";
  let serial = 0;
  const map = new FleetMap({
    pick: (node) => go(`node/${encodeURIComponent(fleet.names[node])}`), describe: (node) => describe(fleet, node),
  });
  map.node.classList.add("low");
  const tell = () => go("events", { job: job || "", cause, bucket, show: which === (bucket ? "all" : "decisions") ? "" : which, at: travel.at || "" }, true);
  const travel = new Travel(() => { tell(); look(); });
  if (Number(query.get("at"))) travel.jump(Number(query.get("at")));
  const mapCard = card("The fleet as it was", "", h("div", {}, map.node, travel.node), "flush");
  const list = h("ol", { class: "events" });
  const listCard = card("Events", "", list, "flush");
  const none = empty("Nothing happened yet", "Every event and every decision about it will stand here.");
  const tabs = segmented("Events", WHICH, which, (value) => { which = value; tell(); show(); });
  const filter = job || cause || bucket ? h("span", { class: "tag other" }, [job ? `job ${job}` : "", words(cause), words(bucket)].filter(Boolean).join(", "), " ",
    h("a", { href: "#/events", "aria-label": "Show all events" }, "✕")) : "";
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Events"), tabs, filter),
    h("div", { class: "grid" }, mapCard, listCard));
  listCard.append(none);

  const nodeName = (number) => fleet?.names[number];
  const fits = (event) => {
    if (bucket && (!EVENTS[bucket]?.includes(event.kind) || (event.kind === "Tick" && !event.commands.length))) return false;
    if (cause && !JSON.stringify(event).includes(cause)) return false;
    if (which === "all") return true;
    return which === "trouble" ? Boolean(toneOf(event.kind)) : !isCalm(event);
  };

  function show() {
    const until = travel.at || Infinity;
    const first = older.length ? older[older.length - 1].sequence : -1;
    const fitting = [...older, ...events.filter((event) => event.sequence > first)].filter(fits);
    const past = fitting.filter((event) => event.time_ns <= until);
    const shown = past.slice(-SHOWN).reverse();
    fill(list, shown, (event) => event.sequence, (event) => eventNode(event, nodeName, (at) => { travel.jump(at); travel.onmove(at); scrollTo(0, 0); }));
    listCard.note(`${travel.at ? `until ${moment(travel.at)}, ` : ""}newest first; ${counted(past.length, "event")}${past.length > SHOWN ? `, ${SHOWN} shown` : ""}`);
    none.hidden = shown.length > 0;
    travel.times = fitting.map((event) => [event.time_ns, toneOf(event.kind)]);
  }

  async function look() {
    const mine = ++serial;
    const [next] = await Promise.all([get(`/v1/fleet${travel.at ? `?at_ns=${travel.at}` : ""}`), past()]);
    if (mine !== serial) return; // the slider has moved on
    fleet = next;
    map.show(fleet, colourBy("state", fleet));
    mapCard.note(jobsThen(fleet.jobs));
    mapCard.dataset.at = String(fleet.time_ns);
    show();
    travel.span(fleet.first_ns, Math.max(Date.now() * 1e6, fleet.time_ns));
  }

  // Of few jobs each is named, of many their states are counted.
  function jobsThen(jobs) {
    if (!jobs.length) return "no job held nodes";
    if (jobs.length <= 4) return jobs.map((each) => `${each.name}: ${each.state}, generation ${each.generation}`).join("; ");
    const states = new Map();
    for (const each of jobs) states.set(each.state, (states.get(each.state) ?? 0) + 1);
    return [...states].map(([name, count]) => `${counted(count, "job")} ${name}`).join(", ");
  }

  // What had happened before a moment of which the newest events say nothing.
  async function past() {
    older = [];
    const complete = !events.length || events[0].sequence === 1;
    if (!travel.at || complete || events.filter((event) => event.time_ns <= travel.at).length >= SHOWN) return;
    older = (await get(`/v1/events?limit=1000&until_ns=${travel.at}${job ? `&job=${job}` : ""}`)).events;
  }

  async function more() {
    const last = events.length ? events[events.length - 1].sequence : -1;
    const part = await get(`/v1/events?limit=1000&after=${last}${job ? `&job=${job}` : ""}`);
    const fresh = part.events.filter((event) => event.sequence > last);
    events = [...events, ...fresh].slice(-KEPT);
  }
  const refresh = async () => { await more(); await look(); };
  return {
    node, refresh, repaint: () => { if (fleet) { map.show(fleet, colourBy("state", fleet)); travel.paint(); } },
    close: () => map.close(),
  };
}
