// Events with what was decided about each, why, and the evidence.
import { h } from "./dom.js";
import { clock, counted, spaced, words } from "./format.js";

const LOUD = new Set(["WorkerExited", "NodeSilent", "DeviceError", "GangStuck", "RestoreFailed", "NoProgress", "Corruption", "LossSpike"]);
const FOUND = new Set(["SlowRank", "ThroughputRegression", "DataStarved", "NodeNotice", "StorageSlow", "DrainNode", "QuarantineNode"]);

export const toneOf = (kind) => (LOUD.has(kind) ? "bad" : FOUND.has(kind) ? "warn" : "");
const everyday = (event, { kind }) => kind === "FlushAllowed" || (kind === "Go" && event.kind !== "GangReady");
const decided = (event) => event.commands.some((each) => !everyday(event, each));
// Nothing was decided about it, and nothing is wrong.
export const isCalm = (event) => !decided(event) && !toneOf(event.kind);

const TITLE = { Tick: "the time has come" }; // a deadline of the core
const fact = ([key, value]) => {
  if (key === "node") return typeof value === "object" ? "" : `on ${value}`;
  if (Array.isArray(value)) return value.length ? `${words(key)} ${value.length > 6 ? counted(value.length, "entry", "entries") : value.join(", ")}` : "";
  if (value === null || typeof value === "object") return "";
  return value === "" || value === -1 ? "" : `${words(key)} ${value}`;
};

export function eventNode(event, nodeName, onat) {
  const body = { ...event.body };
  if (Number.isInteger(body.node) && nodeName(body.node)) body.node = nodeName(body.node);
  if (Array.isArray(body.nodes)) body.nodes = body.nodes.map((each) => nodeName(each) ?? each);
  for (const key of ["at_ns", "deadline_ns"]) if (body[key]) body[key.replace("_ns", "")] = clock(body[key]);
  delete body.at_ns;
  delete body.deadline_ns;
  const { job } = body;
  delete body.job;
  const name = body.spec?.name ?? (typeof body.node === "object" ? body.node?.name : "");
  const facts = Object.entries(body).map(fact).filter(Boolean).join(" · ");
  const when = onat
    ? h("button", { type: "button", class: "plain", title: "Show the fleet at this moment", onclick: () => onat(event.time_ns) }, clock(event.time_ns, true))
    : clock(event.time_ns, true);
  const shown = h("pre", { class: "mono", hidden: true });
  const more = h("button", { type: "button", class: "more", "aria-expanded": "false", onclick: () => {
    shown.hidden = !shown.hidden;
    if (!shown.hidden) shown.textContent = evidence(event);
    more.setAttribute("aria-expanded", String(!shown.hidden));
  } }, "evidence");
  return h("li", { class: `event ${LOUD.has(event.kind) ? "loud" : isCalm(event) ? "calm" : ""}`, "data-kind": event.kind },
    h("div", { class: "when" }, when, h("small", {}, `#${event.sequence}`)),
    h("div", {},
      h("span", { class: `kind ${toneOf(event.kind)}` }, TITLE[event.kind] ?? spaced(event.kind)), name ? ` ${name}` : "",
      job ? [" ", h("a", { href: `#/job/${job}` }, `job ${job}`)] : "", " ", h("span", { class: "facts" }, facts),
      event.commands.slice(0, 8).map((command) => h("div", { class: "decision" },
        h("span", {}, h("span", { class: "strong" }, spaced(command.kind)), command.nodes ? ` to ${counted(command.nodes, "node")}: ` : ": ", command.why.text))),
      event.commands.length > 8 ? h("div", { class: "faint" }, `and ${event.commands.length - 8} more`) : "",
      shown), more);
}

const evidence = (event) => JSON.stringify({ ...event.body, decisions: event.commands.map((each) => ({ [each.kind]: each.why })) }, null, 1);
