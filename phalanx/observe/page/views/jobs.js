// Every job: what it does, how far it is, why it is where it is.
import { get } from "../lib/api.js";
import { card, empty, fill, h, rowLink, segmented, table } from "../lib/dom.js";
import { counted, moment, percent, short, span, whole } from "../lib/format.js";
import { state } from "../lib/state.js";

const MOST = 1000, SHOWN = 300;
const KINDS = { all: () => true, running: (job) => !["pending", ...ENDED].includes(job.state), waiting: (job) => job.state === "pending", ended: (job) => ENDED.includes(job.state) };
const ENDED = ["done", "failed", "cancelled"];

export function jobsView() {
  let which = "all";
  let jobs = [];
  const list = table(["job", "state", "team", ["GPUs", "num"], "progress", ["loss", "num"], ["tokens/s", "num"], ["ran", "num"], "submitted", "why"]);
  const nothing = empty("No jobs", h("p", {}, "Submit one: ", h("code", {}, "phalanx submit examples/demo.toml")));
  const tabs = segmented("Jobs", [["all", "All"], ["running", "Running"], ["waiting", "Waiting"], ["ended", "Ended"]], which, (value) => { which = value; show(); });
  const find = h("input", { class: "field", type: "search", placeholder: "Name, user, team or number", "aria-label": "Find a job", oninput: () => show() });
  const listCard = card("Jobs", "", list, "flush");
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Jobs"), tabs, h("div", { class: "find" }, find)), nothing, listCard);

  const progress = (job) => {
    if (!job.steps) return h("td", {}, job.step ? `step ${whole(job.step)}` : "");
    return h("td", {}, h("span", { class: "nowrap" }, `${whole(job.step)} of ${whole(job.steps)}`),
      h("div", { class: "progress", role: "img", "aria-label": percent(job.step / job.steps, 0) }, h("div", { style: { width: `${Math.min(100, (100 * job.step) / job.steps)}%` } })));
  };

  function show() {
    const text = find.value.trim().toLowerCase();
    const fits = (job) => KINDS[which](job) && (!text || `${job.id} ${job.name} ${job.user} ${job.team}`.toLowerCase().includes(text));
    const found = jobs.filter(fits);
    listCard.note(`${counted(found.length, "job")}, newest first${found.length > SHOWN ? `; ${SHOWN} shown` : ""}${jobs.length === MOST ? `; older than the last ${whole(MOST)} are told by phalanx ps --all` : ""}`);
    nothing.hidden = jobs.length > 0;
    listCard.hidden = !jobs.length;
    fill(list.body, found.slice(0, SHOWN), (job) => job.id, (job) => rowLink(`#/job/${job.id}`,
      h("td", {}, h("a", { href: `#/job/${job.id}` }, `${job.id} ${job.name}`), h("div", { class: "faint small" }, job.user)),
      h("td", {}, state(job.state), job.phase && job.phase !== job.state ? h("div", { class: "faint small" }, job.phase) : ""),
      h("td", {}, job.team), h("td", { class: "num" }, whole(job.gpus)), progress(job),
      h("td", { class: "num" }, job.loss === null ? "" : short(job.loss)), h("td", { class: "num" }, job.tokens_per_second === null ? "" : short(job.tokens_per_second)),
      h("td", { class: "num" }, job.ran_seconds ? span(job.ran_seconds) : "–"), h("td", { class: "nowrap" }, moment(job.submitted_ns)),
      h("td", {}, h("span", { class: "clip", title: job.why.text }, job.why.text))));
  }

  async function refresh() {
    jobs = (await get(`/v1/jobs?state=all&limit=${MOST}&newest=true`)).jobs.reverse();
    show();
  }
  return { node, refresh };
}
