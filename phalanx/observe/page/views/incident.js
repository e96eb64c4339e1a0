// One incident: what happened when, the evidence, what was decided and what else could have been, what it cost.
import { Refused, call, get } from "../lib/api.js";
import { commandNode, shellWords } from "../lib/command.js";
import { card, empty, figure, h, prose, setText } from "../lib/dom.js";
import { eventNode } from "../lib/eventlist.js";
import { evidence } from "../lib/evidence.js";
import { dollars, gpuHours, moment, short, span, whole, words } from "../lib/format.js";
import { together } from "../lib/incidents.js";
import { LogPane } from "../lib/logpane.js";
import { rem } from "../lib/scale.js";

const BEFORE = 5, AFTER = 15; // seconds of the log around it
const STAGES = [["WorkerExited", "failed"], ["NodeSilent", "silent"], ["DeviceError", "device"], ["NoProgress", "no step"], ["GangJoined", "joined"], ["GangReady", "restored"]];
const NODE_GPUS = 8; // of a node of the simulator
const LABEL = 4.6; // rem that a label of the time line takes

// The same kind of failure on a gang of this size, through the same core: about one a day.
export function simulation(cause, gpus) {
  const nodes = Math.max(2, Math.ceil(gpus / NODE_GPUS)), rate = Math.max(1, Math.round(1000 / nodes));
  return shellWords("phalanx", "simulate", "llama3-54d", "--gpus", nodes * NODE_GPUS, "--days", 2, "--set", "job.tensor=1", "--set", `faults.per_1000_node_days=${rate}`, "--set", `faults.causes.${cause}=${rate}`, "--replay", 1);
}

// "swap with 7216 or requeue with 7219", as a reason tells it.
export const alternatives = (text) => [...String(text ?? "").matchAll(/([a-z_ ]+?) with (\d+)/g)].map(([, rung, loss]) => ({ rung: rung.replace(/^ or /, "").trim(), loss: Number(loss) }));

// The step that the gang went on from; until it has, what was safe when it failed.
export const continuedFrom = (known, events, time) => events.find((event) => event.kind === "GangReady" && event.time_ns / 1e9 >= time)?.body.step ?? known.committed;

// Where marks stand, as shares of the line, and how far their labels give way to those before them, above and below by turns.
export function labelled(seconds, longest, wide, label) {
  const free = [-Infinity, -Infinity];
  return seconds.map((after, i) => {
    const share = Math.min(1, after / longest), at = Math.max(share * wide, free[i % 2]);
    free[i % 2] = at + label;
    return { share, away: at - share * wide };
  });
}

export function incidentView({ rest: [id, at] }) {
  const job = Number(id), time = Number(at);
  const title = h("h1", {}, "Incident"), when = h("p");
  const figures = { away: figure("until the next step"), lost: figure("GPU time it took"), money: figure("price of that"), steps: figure("steps made again"), where: figure("where") };
  const line = h("div", { class: "timeline" });
  const story = h("ol", { class: "story" });
  const lineCard = card("Time line", "", h("div", {}, line, story));
  const decided = h("div", { class: "decision" });
  const facts = h("div", { class: "fold" });
  const again = h("div", { class: "again" });
  const batch = h("div", { class: "again" });
  const stacks = h("pre", { class: "log", tabIndex: 0, "aria-label": "Stacks" });
  const stackCard = card("Stacks", "what every rank was doing when the gang made no more steps", h("div", {}, stacks, h("div", { class: "under" }, commandNode(shellWords("phalanx", "logs", job, "--stacks")))));
  const logs = new LogPane(job);
  const node = h("div", {}, h("div", { class: "title" }, h("a", { href: `#/job/${job}` }, `Job ${job}`), h("span", { class: "faint" }, "/"), title, when),
    h("div", { class: "grid" }, card("What it cost", "", h("dl", { class: "figures" }, Object.values(figures))), lineCard, card("Decision", "and what else could have been done", decided, "half"), card("Evidence", "", facts, "half"),
      card("Batch in flight", "what the step that was lost had read", batch, "half"), card("Look again", "the same from a terminal", again, "half"), stackCard, card("Logs", "of the rank it began with, from its first error on", logs.node)));
  stackCard.hidden = true;
  let shown = false, fleet = null;

  async function refresh() {
    if (shown) return; // what happened does not change
    const [{ findings }, { job: now }, ledger] = await Promise.all([get(`/v1/jobs/${job}/incidents`), get(`/v1/jobs/${job}`), get(`/v1/jobs/${job}/ledger`)]);
    fleet ??= await get("/v1/fleet");
    const found = together(findings, []).find((each) => Math.abs(each.time - time) < 0.01);
    if (!found) { node.replaceChildren(empty("No such incident", h("a", { href: `#/job/${job}` }, `Job ${job}`), " lists those that are known.")); return; }
    const until = Math.round((time + (found.away ?? 0) + AFTER) * 1e9);
    const { events } = await get(`/v1/events?job=${job}&until_ns=${until}&limit=500`);
    show(found, events.filter((event) => event.time_ns / 1e9 >= time - BEFORE), now, ledger);
    shown = found.away !== null || Boolean(now.ended_ns);
  }

  function show(found, events, now, ledger) {
    const known = found.finding?.evidence ?? {}, gpus = Math.max(1, now.gpus);
    setText(title, found.text);
    setText(when, `${moment(time * 1e9)}${found.finding?.node ? `, on ${found.finding.node}` : ""}${known.root_cause_class ? `; a failure of ${words(known.root_cause_class)}` : ""}`);
    const lost = found.away === null ? null : found.away * gpus;
    figures.away.set(found.away === null ? "–" : span(found.away), "", known.restored_seconds ? `restored after ${span(known.restored_seconds)}` : "");
    figures.lost.set(...(lost === null ? ["–"] : gpuHours(Math.round(lost * 1e9))), `${whole(gpus)} GPUs waited`);
    const rate = ledger.gpu_hours > 0 ? ledger.dollars / ledger.gpu_hours : 0;
    figures.money.set(lost !== null && rate ? dollars((lost / 3600) * rate) : "–", "", "at the policy's price");
    const from = continuedFrom(known, events, time);
    figures.steps.set(known.step !== undefined && from !== undefined ? whole(Math.max(0, known.step - from)) : "–", "", known.step !== undefined ? `at step ${whole(known.step)}, on from ${whole(from ?? 0)}` : "");
    figures.where.set(found.finding?.rank >= 0 ? `rank ${found.finding.rank}` : "gang", "", found.finding?.node ?? "");
    paintLine(found, events);
    story.replaceChildren(...events.map((event) => {
      const made = eventNode(event, (at) => fleet.names[at]);
      made.querySelector(".when").firstChild.textContent = offset(event.time_ns / 1e9 - time);
      return made;
    }));
    lineCard.note(`${events.length} events of this job around it`);
    decide(found, events);
    facts.replaceChildren(found.finding ? evidence(found.finding) : h("p", { class: "muted" }, "nothing else was recorded"), found.suggestion ? h("p", { class: "small" }, prose(found.suggestion)) : "");
    facts.querySelector("details")?.setAttribute("open", "");
    const rank = Math.max(0, found.finding?.rank ?? 0), step = known.step ?? 0, cause = known.cause;
    again.replaceChildren(
      ...(cause ? [h("p", { class: "small muted" }, "Replay this in the simulator: the same cause on a gang of this size, through the same core."), commandNode(simulation(cause, gpus))] : []),
      h("p", { class: "small muted" }, "Its ranks at the step in flight, and the last words of the one it began with."),
      commandNode(shellWords("phalanx", "steps", job, "--steps", `${step}:${step + 2}`)), commandNode(shellWords("phalanx", "logs", job, "--rank", rank)));
    if (!logs.opened) { logs.opened = true; logs.openAtError(rank); showBatch(step + 1, rank); showStacks(known.failed_generation); }
    document.title = `${found.text} · Phalanx`;
  }

  // The step that was being made: its samples, and the part of the rank that it began with.
  async function showBatch(step, rank) {
    try {
      const found = await get(`/v1/jobs/${job}/batch?step=${step}&rank=${rank}`);
      const range = (first, count) => `${whole(first)} to ${whole(first + count - 1)}`;
      batch.replaceChildren(
        h("p", {}, `Step ${whole(step)}: samples ${range(found.first_sample, found.samples)}, ${whole(found.samples * found.sequence)} tokens of ${found.data.join(", ")}.`),
        h("p", {}, found.rank_samples ? `Of these, the replica of rank ${whole(rank)} had ${range(found.rank_first_sample, found.rank_samples)}.` : ""),
        h("p", { class: "small muted" }, "The file, block and text of each, with the job's own file:"),
        commandNode(`${shellWords("phalanx", "show", job, "--toml")} > job-${job}.toml`), commandNode(shellWords("phalanx", "data", "order", `job-${job}.toml`, "--step", step, "--rank", rank, "--text", 64)));
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      batch.replaceChildren(h("p", { class: "muted" }, problem.message));
    }
  }

  async function showStacks(generation) {
    if (!generation) return; // 0 would be any
    try {
      const text = await (await call(`/v1/jobs/${job}/stacks?generation=${generation}`)).text();
      stackCard.hidden = !text.includes("== rank");
      setText(stacks, text);
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem; // then there are none to show
    }
  }

  const offset = (seconds) => `${seconds < 0 ? "−" : "+"}${Math.abs(seconds).toFixed(2)} s`;

  function paintLine(found, events) {
    const seconds = Math.max(0.5, found.away ?? 0, ...events.map((event) => event.time_ns / 1e9 - time).filter((each) => each < (found.away ?? AFTER) + 1));
    const marks = [[0, "failed", "bad"], ...STAGES.slice(4).flatMap(([kind, text]) => {
      const event = events.find((each) => each.kind === kind && each.time_ns / 1e9 >= time);
      return event ? [[event.time_ns / 1e9 - time, text, "other"]] : [];
    })];
    const decision = events.find((event) => event.commands.some((each) => each.kind === "Form") && event.time_ns / 1e9 >= time);
    if (decision) marks.push([decision.time_ns / 1e9 - time, "decided", "warn"]);
    if (found.away !== null) marks.push([found.away, "next step", "good"]);
    marks.sort(([a], [b]) => a - b);
    const places = labelled(marks.map(([after]) => after), seconds, line.getBoundingClientRect().width, LABEL * rem());
    line.replaceChildren(...marks.map(([after, text, tone], i) => h("span", { class: `mark ${tone} ${i % 2 ? "low" : ""}`, style: { left: `${100 * places[i].share}%`, "--away": `${places[i].away}px` } }, h("i", {}), h("b", {}, text), h("small", {}, offset(after)))));
  }

  function decide(found, events) {
    const reasons = events.flatMap((event) => event.commands.map((each) => each.why)).filter((why) => why.facts.rung);
    const { facts: chosen = {}, text = found.decision } = reasons[0] ?? {};
    const others = alternatives(chosen.other), most = Math.max(1, chosen.loss ?? 0, ...others.map((each) => each.loss));
    const row = (rung, loss, mine) => h("div", { class: "step" }, h("span", { class: mine ? "strong" : "" }, `${words(rung)}${mine ? " (taken)" : ""}`), h("div", { class: "track" }, h("div", { class: `part ${mine ? "made" : "planned"}`, style: { left: 0, width: `${(100 * loss) / most}%` } })), h("span", { class: "value" }, short(loss), h("small", {}, "GPU-s")));
    decided.replaceChildren(h("p", {}, text || "nothing had to be decided"), ...(chosen.rung ? [h("div", { class: "steps" }, row(chosen.rung, chosen.loss ?? 0, true), ...others.map((each) => row(each.rung, each.loss, false))), h("p", { class: "small muted" }, "Estimated loss of each way, as it was priced then.")] : []));
  }

  return { node, refresh, close: () => logs.close() };
}
