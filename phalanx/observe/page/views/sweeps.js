// Sweeps: their trials as lines over the settings that vary, and the best of them as a table.
import { get } from "../lib/api.js";
import { card, empty, fill, h, rowLink, table } from "../lib/dom.js";
import { counted, moment, short, span, whole } from "../lib/format.js";
import { Parallel } from "../lib/parallel.js";
import { state } from "../lib/state.js";

const SHOWN = 50;

// The furthest job of each trial, the best first; those without a value at the end.
export function ranked(trials, better) {
  const newest = new Map();
  for (const each of trials) {
    const known = newest.get(each.trial);
    if (!known || each.rung > known.rung || (each.rung === known.rung && each.job > known.job)) newest.set(each.trial, each);
  }
  const sign = better === "lower" ? 1 : -1;
  return [...newest.values()].sort((a, b) => (a.value === null) - (b.value === null) || b.rung - a.rung || sign * (a.value - b.value) || a.trial - b.trial);
}

export function sweepsView({ rest }) {
  const name = rest[0] ?? "";
  const list = table(["sweep", "user", ["trials", "num"], ["live", "num"], ["failed", "num"], "metric", ["best", "num"], "began"]);
  const none = empty("No sweep yet", h("p", {}, "Try settings of a job: ", h("code", {}, "phalanx sweep run examples/sweep.toml")));
  const listCard = card("Sweeps", "", h("div", {}, none, list), "flush");
  const picture = new Parallel((trial) => { location.hash = `#/job/${trial.job}`; });
  const pictureCard = card("Trials", "", picture.node);
  const best = table(["trial", "state", ["steps", "num"], ["value", "num"], ["time", "num"], "settings"]);
  const bestCard = card("Best", "", best, "flush");
  const title = name ? [h("a", { href: "#/sweeps" }, "Sweeps"), ` / ${name}`] : ["Sweeps"];
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, title)), h("div", { class: "grid" }, name ? [pictureCard, bestCard] : [listCard]));

  async function showList() {
    const { sweeps } = await get("/v1/sweeps");
    none.hidden = sweeps.length > 0;
    list.hidden = !sweeps.length;
    fill(list.body, sweeps.toReversed(), (each) => each.sweep, (each) => rowLink(`#/sweeps/${encodeURIComponent(each.sweep)}`,
      h("td", {}, h("a", { href: `#/sweeps/${encodeURIComponent(each.sweep)}` }, each.sweep)), h("td", {}, each.user), h("td", { class: "num" }, whole(each.trials)),
      h("td", { class: "num" }, whole(each.live)), h("td", { class: "num" }, whole(each.failed)), h("td", {}, `${each.metric} (${each.better} is better)`),
      h("td", { class: "num" }, short(each.best, 5)), h("td", {}, moment(each.began_ns))));
  }

  async function allTrials() {
    const trials = [];
    let answer = { next_after: 0 };
    do {
      answer = await get(`/v1/sweeps/${encodeURIComponent(name)}?after=${answer.next_after}&limit=1000`);
      trials.push(...answer.trials);
    } while (answer.next_after);
    return { ...answer, trials };
  }

  async function showOne() {
    const { trials, metric, better } = await allTrials();
    const order = ranked(trials, better);
    const last = Math.max(...order.map((each) => each.rung));
    picture.show(order, metric, last);
    const live = order.filter((each) => ["pending", "forming", "running", "draining"].includes(each.state)).length;
    pictureCard.note(`${counted(order.length, "trial")}, ${live} live; ${metric}, ${better} is better`);
    bestCard.note(order.length > SHOWN ? `${SHOWN} of ${whole(order.length)}` : "");
    fill(best.body, order.slice(0, SHOWN), (each) => each.trial, (each) => rowLink(`#/job/${each.job}`,
      h("td", {}, h("a", { href: `#/job/${each.job}` }, `${each.trial}`), h("div", { class: "faint small" }, `job ${each.job}`)), h("td", {}, state(each.state)),
      h("td", { class: "num" }, whole(each.steps)), h("td", { class: "num" }, short(each.value, 5)), h("td", { class: "num" }, span(each.ran_seconds)),
      h("td", { class: "mono" }, Object.entries(each.settings).map(([key, value]) => `${key}=${value}`).join(" "))));
  }

  return { node, refresh: name ? showOne : showList, repaint: () => picture.draw(), close: () => picture.close() };
}
