// One job: is it learning, is it fast, is it healthy, and what happened to it.
import { actionButton, jobOrders, refusedTo } from "../lib/actions.js";
import { get, post, who } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { card, empty, fill, h, prose, setText, table } from "../lib/dom.js";
import { evidence } from "../lib/evidence.js";
import { HeatMap } from "../lib/heatmap.js";
import { incidentsOf, lossOf, sentence, stepAt, together } from "../lib/incidents.js";
import { JobFigures } from "../lib/jobfigures.js";
import { clock, counted, gpuHours, quantity, short, span, tickPercent, whole } from "../lib/format.js";
import { LogPane } from "../lib/logpane.js";
import { RunCard } from "../lib/runcard.js";
import { RankRecords } from "../lib/rankrecords.js";
import { meshNode } from "../lib/mesh.js";
import { ScoreCurves } from "../lib/scorecurves.js";
import { state } from "../lib/state.js";
import { MEASURED_NAMES, waterfall } from "../lib/waterfall.js";
import { WhatIf } from "../lib/whatif.js";

const CURVES = [
  ["loss", "Loss", "", short], ["grad_norm", "Gradient norm", "", short],
  ["tokens_per_second", "Tokens per second", "", short], ["mfu", "MFU", "", (v, digits = 3) => tickPercent(v, v < 0.1 ? digits + 1 : digits)],
];
const bytes = (v, digits) => quantity(v, "B", digits);
const MORE = [
  ["learning_rate", "Learning rate", short], ["step_seconds", "Step time", span], ["peak_memory_bytes", "Memory of the fullest rank", bytes],
  ["tokens_per_second_per_gpu", "Tokens per second and rank", short], ["scaling_efficiency", "Against the smallest world size", tickPercent], ["plan_efficiency", "Against the plan", tickPercent],
  ["checkpoint_seconds", "Held up by a checkpoint", span], ["dollars_per_million_tokens", "Dollars per million tokens", short], ["joules_per_million_tokens", "Joules per million tokens", short],
];
const VALIDATION = "validation_loss"; // a line of its own on the loss
const NAMES = [...CURVES.map(([name]) => name), VALIDATION, ...MEASURED_NAMES].join(",");
const MORE_NAMES = MORE.map(([name]) => name).join(",");
const MOST_CELLS = 400_000; // of the heat map in one answer
const heatColumns = (job) => Math.max(24, Math.min(300, Math.floor(MOST_CELLS / Math.max(1, job.gpus > 1024 ? job.nodes.length : job.gpus))));
const WHERE = { memory: "memory", durable: "durable storage" };
const PROOF = { sealed: ["good", "sealed by every rank"], committed: ["other", "committed"], restored: ["good", "proved by a restore"], refused: ["bad", "refused"] };
const newest = (series) => Object.fromEntries(Object.entries(series).map(([name, { value }]) => [name, value.findLast((each) => each !== null)]));
const known = (series) => series?.value?.some((value) => value !== null);

export function jobView({ rest: [id], query, go }) {
  const number = Number(id);
  const group = [];
  const at = { zoom: query.get("zoom") ?? "" }; // the address is the view
  const tell = (change) => go(`job/${id}`, Object.assign(at, change), true);
  const zoomed = (zoom) => tell({ zoom: zoom ? zoom.map(Math.round).join(":") : "" });
  const charts = Object.fromEntries(CURVES.map(([name, label, unit, format]) => [name, new Chart({ label, unit, format, group, zoomed })]));
  const curveCards = CURVES.map(([name, label]) => card(label, "", charts[name].node, "half curve"));
  const now = h("span");
  const title = h("h1", {}, `Job ${id}`);
  const why = h("p");
  const acts = h("div", { class: "acts" });
  const figures = new JobFigures();
  const run = new RunCard();
  const more = MORE.map(([name, label, format]) => {
    const chart = new Chart({ label, format, group, zoomed });
    const box = h("div", { class: "half curve", hidden: true }, h("h3", {}, label), chart.node);
    return { name, label, chart, box };
  });
  const moreBox = h("details", { ontoggle: () => { if (moreBox.open) refresh(); } }, h("summary", {}, "Learning rate, memory, scaling, energy and price"), h("div", { class: "grid curves" }, more.map((each) => each.box)));
  const moreCard = card("More curves", "", moreBox);
  const scores = new ScoreCurves(number, group);
  const [from, to] = at.zoom.split(":").map(Number);
  if (to > from) for (const chart of group) chart.zoom = [from, to];
  const scoreCard = card("Scores", "tasks and domains, as it trains", scores.node);
  scoreCard.hidden = true;
  const heat = new HeatMap();
  const named = h("div", { class: "named", role: "status" });
  const closer = new RankRecords(number);
  heat.pick = (step) => closer.show(step);
  const heatLegend = h("div", { class: "legend" });
  const heatCard = card("Step time by rank", "", h("div", {}, named, heat.node, heatLegend, closer.node));
  const incidents = h("ul", { class: "list" });
  const incidentCard = card("Incidents", "", incidents, "half");
  const planBox = h("div");
  const planCard = card("Where a step goes", "", planBox, "half");
  const meshBox = h("div");
  const meshCard = card("Mesh", "", meshBox, "half");
  const saves = table(["step", "where", "proof"]);
  const noSave = empty("None", "Steps that it can go back to, and what proves each.");
  const savesCard = card("Checkpoints", "", h("div", {}, noSave, saves), "half flush");
  const whatIf = new WhatIf(number);
  const whatIfCard = card("What if", "what a change would make of it, calibrated by its own steps", whatIf.node);
  const logs = new LogPane(number, tell);
  logs.read(query);
  Object.assign(at, logs.shown);
  const spec = h("pre", { class: "log" });
  let logOpen = false;
  let heatAt = 0;
  let fleet = null;
  let fleetAt = 0;
  const fleetDue = () => {
    if (fleet && Date.now() - fleetAt < (fleet.names.length > 500 ? 10_000 : 1500)) return false;
    fleetAt = Date.now();
    return true;
  };
  // A large gang's heat map is megabytes: it is asked for now and then, not with every step.
  const heatDue = () => {
    if (heat.data && heat.cells.length > 1000 && Date.now() - heatAt < 5000) return false;
    heatAt = Date.now();
    return true;
  };
  const node = h("div", {},
    h("div", { class: "title" }, h("a", { href: "#/jobs" }, "Jobs"), h("span", { class: "faint" }, "/"), title, now, acts, why),
    h("div", { class: "grid" },
      card("Now", "", figures.node), incidentCard, planCard, ...curveCards, scoreCard, moreCard, heatCard,
      meshCard, savesCard, whatIfCard, card("Where it comes from", "", h("div", {}, run.node, h("details", { class: "fold" }, h("summary", {}, "As submitted"), spec))),
      card("Logs", "read from the node that runs the rank", logs.node)));

  async function refresh() {
    const detail = await get(`/v1/jobs/${id}`);
    const { job } = detail;
    const gang = detail.spec.gang ?? {};
    if (fleetDue()) fleet = await get("/v1/fleet");
    const [events, metrics, ranks, ledger, plan, found, kept, described, others, waits] = await Promise.all([
      get(`/v1/events?job=${id}&limit=1000`), get(`/v1/jobs/${id}/metrics?names=${NAMES}&points=800`),
      heatDue() ? get(`/v1/jobs/${id}/ranks?columns=${heatColumns(job)}`) : null, get(`/v1/jobs/${id}/ledger`), get(`/v1/jobs/${id}/plan`), get(`/v1/jobs/${id}/incidents`), get(`/v1/jobs/${id}/checkpoints`),
      get(`/v1/runs/${id}`), moreBox.open ? get(`/v1/jobs/${id}/metrics?names=${MORE_NAMES}&points=400`) : null,
      job.state === "pending" ? get(`/v1/jobs/${id}/why`) : null,
    ]);
    setText(title, `${job.id} ${job.name}`);
    now.replaceChildren(state(job.state, job.phase && job.phase !== job.state ? `${job.state}, ${job.phase}` : job.state));
    const reason = waits?.waits_for?.text;
    const waiting = !reason ? job.why.text : reason.includes(waits.start) ? reason : `${reason}; estimated start: ${waits.start}`;
    setText(why, waiting);
    await showActs(job, detail);
    const series = metrics?.series ?? {};
    const states = new Map(fleet.names.map((name, i) => [name, fleet.states[fleet.state[i]]]));
    const nodeName = (at) => fleet.names[at];
    const happened = [...together(found.findings, incidentsOf(events.events, number).map((each) => told(each, nodeName))), ...detail.losses.map(lossOf)]
      .sort((a, b) => a.time - b.time);
    closer.made(job.step);
    figures.show(job, { ...newest(series), ...described.summary }, ledger, plan, detail);
    run.show(described);
    // A program that reports no steps, or what ended before its first one, never has any of these.
    const stepless = !job.step && !known(series.step_seconds) && (job.ended_ns || detail.spec.reports_steps === false);
    for (const each of [planCard, ...curveCards, moreCard, heatCard]) each.hidden = Boolean(stepless);
    const marks = marksOf(happened, series);
    curves(series, marks, plan);
    scoreCard.hidden = !await scores.show(described.summary.scores ?? {}, marks);
    if (others) for (const { name, label, chart, box } of more) {
      const one = others.series[name];
      box.hidden = !known(one);
      if (known(one)) chart.show([{ name: label.toLowerCase(), x: one.step, y: one.value, min: one.min, max: one.max }], marks);
    }
    showIncidents(happened, job);
    if (ranks) showHeat(ranks, gang.pipeline ?? 1, marks);
    planBox.replaceChildren(waterfall(plan, series));
    planCard.note(plan.prediction || known(series.mfu) ? "from the peak of the devices down to MFU" : "as it was measured");
    const held = job.nodes.length ? job.nodes : lastNodes(gang);
    meshCard.note(job.nodes.length || !held.length ? "which rank holds what, and where" : "which rank held what, and where, at last");
    meshBox.replaceChildren(held.length ? meshNode(gang, job.replicas, held, (name) => states.get(name)) : job.ended_ns ? empty("No mesh to show", "It ended before a rank told of a step.") : empty("Not placed yet", waiting));
    showSaves(kept.saved);
    whatIfCard.hidden = Boolean(job.ended_ns) || detail.spec.reports_steps === false;
    setText(spec, JSON.stringify(detail.spec, null, 1));
    if (!logOpen && job.started_ns) { logOpen = true; logs.open(); }
  }

  // Buttons stay while nothing about them changes: one is not to lose them under the pointer.
  async function showActs(job, detail) {
    const role = (await who()).token.role, key = [job.state, job.held, job.replicas, role].join();
    if (acts.key === key) return;
    acts.key = key;
    whatIf.allow(role);
    const copy = detail.spec.reports_steps === false ? [] : [h("a", { class: "button", href: `#/submit?from=${number}` }, "Submit a copy")];
    acts.replaceChildren(...copy, ...jobOrders(job, post, refresh).map((each) => actionButton(each, refusedTo(role, "admin", "user"))));
  }

  const told = (incident, nodeName) => ({
    time: incident.time_ns / 1e9, tone: incident.tone, text: sentence(incident, nodeName), decision: incident.decision,
    away: incident.resumed_ns > 0 ? (incident.resumed_ns - incident.time_ns) / 1e9 : null,
  });

  const marksOf = (happened, series) => happened.flatMap((each) => {
    const x = each.step ?? stepAt(series.loss, each.time);
    return x === null || x === undefined ? [] : [{ x, tone: each.tone, text: each.text }];
  });

  function curves(series, marks, plan) {
    // Of devices whose peak nobody knows there is no MFU: the time of a step says as much.
    const measured = known(series.mfu) || !known(series.step_seconds);
    charts.mfu.options.format = measured ? CURVES[3][3] : span;
    setText(curveCards[3].querySelector("h2"), measured ? "MFU" : "Step time");
    for (const [name, label] of CURVES) {
      const one = name === "mfu" && !measured ? series.step_seconds : series[name];
      const lines = name === "mfu" && plan.prediction ? [{ y: plan.prediction.mfu, text: "planned" }]
        : name === "tokens_per_second" && plan.prediction ? [{ y: plan.prediction.tokens_per_second, text: "planned" }] : [];
      const shown = one ? [{ name: name === "mfu" && !measured ? "step time" : label.toLowerCase(), x: one.step, y: one.value, min: one.min, max: one.max }] : [];
      const unseen = series[VALIDATION];
      if (name === "loss" && known(unseen)) shown.push({ name: "on unseen text", x: unseen.step, y: unseen.value, points: true });
      charts[name].options.waiting = "no step";
      charts[name].show(shown, marks, lines);
    }
  }

  function showIncidents(happened, job) {
    incidentCard.note(happened.length ? counted(happened.length, "incident") : "");
    const items = happened.length ? happened.toReversed().slice(0, 12) : [null];
    fill(incidents, items, (each) => (each ? each.time + each.text : ""), (each) => (each
      ? h("li", {}, h("div", { class: `finding ${each.tone}` }, h("div", {}, h("time", {}, clock(each.time * 1e9)), h("span", { class: "strong" }, each.text)),
        each.decision ? h("p", {}, each.decision) : "", each.suggestion ? h("p", {}, prose(each.suggestion)) : "",
        each.away !== null ? h("p", {}, `The next step was complete after ${span(each.away)}: ${gpuHours(Math.round(each.away * Math.max(1, job.gpus) * 1e9)).join(" ")}.`) : "",
        each.finding ? evidence(each.finding) : "",
        h("div", { class: "bar" }, each.finding ? h("a", { class: "small", href: `#/incident/${job.id}/${each.time}` }, "Open the incident") : "", h("a", { class: "small", href: `#/events?job=${job.id}&at=${Math.round(each.time * 1e9)}` }, "See the fleet at that moment"))))
      : h("li", { class: "muted" }, "None. What goes wrong is listed here, with what was decided and how long it took.")));
  }

  // Where the ranks of a job that has ended were, as their last steps told.
  function lastNodes(gang) {
    const slot = gang.slot_gpus ?? 1;
    return heat.data?.rows === "rank" && slot ? heat.data.nodes.filter((_, rank) => rank % slot === 0) : [];
  }

  function showHeat(ranks, stages, marks) {
    heat.show(ranks, stages, marks);
    heatLegend.replaceChildren(...(ranks.steps.length ? heat.legend() : []));
    heatCard.note(`${heat.own ? "its own work, without waiting for others" : "whole steps"}; each cell over the median of its stage; ${counted(ranks.ranks.length, ranks.rows === "node" ? "node" : "rank")}, ${ranks.steps.length ? `steps ${whole(ranks.steps[0])} to ${whole(ranks.steps[ranks.steps.length - 1])}` : "no step"}`);
    fill(named, heat.slow.slice(0, 3).map((each) => [heat.name(each.index), Math.round((each.ratio - 1) * 100), ranks.nodes[each.index]]), ([name]) => name,
      ([name, slower, on]) => h("p", {}, h("span", { class: "tag bad" }, `${slower} % slower`), " ",
        on ? h("a", { class: "strong", href: `#/node/${encodeURIComponent(on)}` }, name) : h("strong", {}, name)));
  }

  function showSaves(saved) {
    savesCard.note(saved.length ? "steps that it can go back to" : "");
    noSave.hidden = saved.length > 0;
    saves.hidden = !saved.length;
    fill(saves.body, saved.slice(0, 12), (each) => each.step + each.where + each.detail, (each) => h("tr", {}, h("td", { class: "nowrap" }, each.step ? whole(each.step) : "–"),
      h("td", {}, WHERE[each.where], h("div", { class: "faint small" }, each.detail)), h("td", {}, h("span", { class: `tag ${PROOF[each.proof][0]}` }, PROOF[each.proof][1]))));
  }

  return {
    node, refresh, repaint: () => { group.forEach((chart) => chart.draw()); if (heat.data) { heat.pixels(); heat.draw(); } },
    close: () => { group.forEach((chart) => chart.close()); heat.close(); logs.close(); },
  };
}
