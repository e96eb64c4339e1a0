// One job: is it learning, is it fast, is it healthy, and what happened to it.
import { get } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { card, empty, fill, figure, h, setText, table } from "../lib/dom.js";
import { evidence } from "../lib/evidence.js";
import { HeatMap } from "../lib/heatmap.js";
import { incidentsOf, sentence, stepAt, together } from "../lib/incidents.js";
import { clock, counted, dollars, gpuHours, percent, short, span, whole } from "../lib/format.js";
import { LogPane } from "../lib/logpane.js";
import { RankRecords } from "../lib/rankrecords.js";
import { meshNode } from "../lib/mesh.js";
import { state } from "../lib/state.js";
import { MEASURED_NAMES, waterfall } from "../lib/waterfall.js";

const CURVES = [
  ["loss", "Loss", "", short], ["grad_norm", "Gradient norm", "", short],
  ["tokens_per_second", "Tokens per second", "", short], ["mfu", "MFU", "", (v) => percent(v, v < 0.1 ? 2 : 1)],
];
const NAMES = [...CURVES.map(([name]) => name), ...MEASURED_NAMES].join(",");
const MOST_CELLS = 400_000; // of the heat map in one answer
const heatColumns = (job) => Math.max(24, Math.min(300, Math.floor(MOST_CELLS / Math.max(1, job.gpus > 1024 ? job.nodes.length : job.gpus))));
const WHERE = { memory: "memory", durable: "durable storage" };
const PROOF = { sealed: ["good", "sealed by every rank"], committed: ["other", "committed"], restored: ["good", "proved by a restore"], refused: ["bad", "refused"] };
const last = (series) => series?.value?.findLast((value) => value !== null);

export function jobView({ rest: [id] }) {
  const number = Number(id);
  const group = [];
  const charts = Object.fromEntries(CURVES.map(([name, label, unit, format]) => [name, new Chart({ label, unit, format, group })]));
  const curveCards = CURVES.map(([name, label]) => card(label, "", charts[name].node, "half curve"));
  const now = h("span");
  const title = h("h1", {}, `Job ${id}`);
  const why = h("p");
  const figures = Object.fromEntries([["step", "step"], ["loss", "loss"], ["speed", "tokens per second"], ["mfu", "MFU"], ["time", "step time"],
    ["goodput", "goodput"], ["generation", "generation"]].map(([key, name]) => [key, figure(name)]));
  const heat = new HeatMap();
  const named = h("div", { class: "named", role: "status" });
  const closer = new RankRecords(number);
  heat.pick = (step) => closer.show(step);
  const heatCard = card("Step time by rank", "", h("div", {}, named, heat.node, closer.node));
  const incidents = h("ul", { class: "list" });
  const incidentCard = card("Incidents", "", incidents, "half");
  const planBox = h("div");
  const planCard = card("Where a step goes", "from the peak of the devices down to MFU", planBox, "half");
  const meshBox = h("div");
  const meshCard = card("Mesh", "", meshBox, "half");
  const saves = table(["step", "where", "proof"]);
  const savesCard = card("Checkpoints", "", saves, "half flush");
  const logs = new LogPane(number);
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
    h("div", { class: "title" }, h("a", { href: "#/jobs" }, "Jobs"), h("span", { class: "faint" }, "/"), title, now, why),
    h("div", { class: "grid" },
      card("Now", "", h("dl", { class: "figures" }, Object.values(figures))), incidentCard, planCard, ...curveCards, heatCard,
      meshCard, savesCard, card("Logs", "read from the node that runs the rank", logs.node),
      card("As submitted", "", h("details", {}, h("summary", {}, "Show"), spec))));

  async function refresh() {
    const detail = await get(`/v1/jobs/${id}`);
    const { job } = detail;
    const gang = detail.spec.gang ?? {};
    if (fleetDue()) fleet = await get("/v1/fleet");
    const [events, metrics, ranks, ledger, plan, found, kept] = await Promise.all([
      get(`/v1/events?job=${id}&limit=1000`), get(`/v1/jobs/${id}/metrics?names=${NAMES}&points=800`),
      heatDue() ? get(`/v1/jobs/${id}/ranks?columns=${heatColumns(job)}`) : null, get(`/v1/jobs/${id}/ledger`), get(`/v1/jobs/${id}/plan`), get(`/v1/jobs/${id}/incidents`), get(`/v1/jobs/${id}/checkpoints`),
    ]);
    setText(title, `${job.id} ${job.name}`);
    now.replaceChildren(state(job.state, job.phase && job.phase !== job.state ? `${job.state}, ${job.phase}` : job.state));
    setText(why, job.why.text);
    const series = metrics?.series ?? {};
    const states = new Map(fleet.names.map((name, i) => [name, fleet.states[fleet.state[i]]]));
    const nodeName = (at) => fleet.names[at];
    const happened = together(found.findings, incidentsOf(events.events, number).map((each) => told(each, nodeName)));
    closer.newest = job.step;
    glance(job, series, ledger);
    curves(series, happened, plan);
    showIncidents(happened, job);
    if (ranks) showHeat(ranks, gang.pipeline ?? 1);
    planBox.replaceChildren(waterfall(plan, series));
    const held = job.nodes.length ? job.nodes : lastNodes(gang);
    meshCard.note(job.nodes.length || !held.length ? "which rank holds what, and where" : "which rank held what, and where, at last");
    meshBox.replaceChildren(held.length ? meshNode(gang, job.replicas, held, (name) => states.get(name)) : empty("Not placed yet", job.why.text));
    showSaves(kept.saved);
    setText(spec, JSON.stringify(detail.spec, null, 1));
    if (!logOpen && job.started_ns) { logOpen = true; logs.open(); }
  }

  const told = (incident, nodeName) => ({
    time: incident.time_ns / 1e9, tone: incident.tone, text: sentence(incident, nodeName), decision: incident.decision,
    away: incident.resumed_ns > 0 ? (incident.resumed_ns - incident.time_ns) / 1e9 : null,
  });

  function glance(job, series, ledger) {
    figures.step.set(whole(job.step), job.steps ? `of ${whole(job.steps)}` : "", `${whole(job.committed)} safe in memory, ${whole(job.durable)} on disk`);
    figures.loss.set(short(last(series.loss), 4));
    figures.speed.set(short(last(series.tokens_per_second)));
    figures.mfu.set(percent(last(series.mfu), 1));
    figures.time.set(job.step_seconds ? span(job.step_seconds) : "–");
    figures.goodput.set(percent(ledger.goodput, 1), "", `${gpuHours(ledger.allocation_gpu_ns).join(" ")}, ${dollars(ledger.dollars)}`);
    figures.generation.set(job.generation, "", job.generation > 1 ? counted(job.generation - 1, "re-formation") : "never re-formed");
  }

  function curves(series, happened, plan) {
    const marks = happened.flatMap((each) => {
      const x = each.step ?? stepAt(series.loss, each.time);
      return x === null || x === undefined ? [] : [{ x, tone: each.tone, text: each.text }];
    });
    for (const [name, label] of CURVES) {
      const one = series[name];
      const lines = name === "mfu" && plan.prediction ? [{ y: plan.prediction.mfu, text: "planned" }]
        : name === "tokens_per_second" && plan.prediction ? [{ y: plan.prediction.tokens_per_second, text: "planned" }] : [];
      charts[name].options.waiting = name === "mfu" && series.loss?.step.length ? "not known for these devices" : "no step yet";
      charts[name].show(one ? [{ name: label.toLowerCase(), x: one.step, y: one.value, min: one.min, max: one.max }] : [], marks, lines);
    }
  }

  function showIncidents(happened, job) {
    incidentCard.note(happened.length ? counted(happened.length, "incident") : "");
    const items = happened.length ? happened.toReversed().slice(0, 12) : [null];
    fill(incidents, items, (each) => (each ? each.time + each.text : ""), (each) => (each
      ? h("li", {}, h("div", { class: `finding ${each.tone}` }, h("div", {}, h("time", {}, clock(each.time * 1e9)), h("span", { class: "strong" }, each.text)),
        each.decision ? h("p", {}, each.decision) : "", each.suggestion ? h("p", {}, each.suggestion) : "",
        each.away !== null ? h("p", {}, `The next step was complete after ${span(each.away)}.`) : "",
        each.finding ? evidence(each.finding) : "",
        h("a", { class: "small", href: `#/events?job=${job.id}&at=${Math.round(each.time * 1e9)}` }, "See the fleet at that moment")))
      : h("li", { class: "muted" }, "None. What goes wrong is listed here, with what was decided and how long it took.")));
  }

  // Where the ranks of a job that has ended were, as their last steps told.
  function lastNodes(gang) {
    const slot = gang.slot_gpus ?? 1;
    return heat.data?.rows === "rank" && slot ? heat.data.nodes.filter((_, rank) => rank % slot === 0) : [];
  }

  function showHeat(ranks, stages) {
    heat.show(ranks, stages);
    heatCard.note(`${heat.own ? "its own work, without waiting for others" : "whole steps"}; each cell over the median of its stage; ${counted(ranks.ranks.length, ranks.rows === "node" ? "node" : "rank")}, last ${counted(ranks.steps.length, "step")}`);
    fill(named, heat.slow.slice(0, 3).map((each) => [heat.name(each.index), Math.round((each.ratio - 1) * 100), ranks.nodes[each.index]]), ([name]) => name,
      ([name, slower, on]) => h("p", {}, h("span", { class: "tag bad" }, `${slower} % slower`), " ",
        on ? h("a", { class: "strong", href: `#/node/${encodeURIComponent(on)}` }, name) : h("strong", {}, name)));
  }

  function showSaves(saved) {
    savesCard.note(saved.length ? "steps that it can go back to" : "none yet");
    fill(saves.body, saved.slice(0, 12), (each) => each.step + each.where + each.detail, (each) => h("tr", {}, h("td", { class: "nowrap" }, each.step ? whole(each.step) : "–"),
      h("td", {}, WHERE[each.where], h("div", { class: "faint small" }, each.detail)), h("td", {}, h("span", { class: `tag ${PROOF[each.proof][0]}` }, PROOF[each.proof][1]))));
  }

  return {
    node, refresh, repaint: () => { group.forEach((chart) => chart.draw()); if (heat.data) { heat.pixels(); heat.draw(); } },
    close: () => { group.forEach((chart) => chart.close()); heat.close(); logs.close(); },
  };
}
