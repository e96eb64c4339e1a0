// Every job: what it does, how far it is, why it is where it is.
import { get, status } from "../lib/api.js";
import { card, empty, fill, h, rowLink, segmented, setText, table } from "../lib/dom.js";
import { counted, moment, percent, short, span, whole } from "../lib/format.js";
import { state } from "../lib/state.js";

const MOST = 1000; // that are looked through
const SHOWN = 100, MORE = 200; // rows at first, and with every press
const KINDS = { all: () => true, running: (job) => !["pending", ...ENDED].includes(job.state), waiting: (job) => job.state === "pending", ended: (job) => ENDED.includes(job.state) };
const ENDED = ["done", "failed", "cancelled"];

export function jobsView({ go, query }) {
  let which = "all", limit = SHOWN, total = 0;
  let jobs = [];
  const list = table(["job", "state", "team", ["GPUs", "num"], "progress", ["loss", "num"], ["tokens/s", "num"], ["ran", "num"], "submitted", "why"]);
  const nothing = empty("No jobs", h("p", {}, h("a", { href: "#/submit" }, "Write one here"), ", or ", h("code", {}, "phalanx submit examples/demo.toml")));
  const tabs = segmented("Jobs", [["all", "All"], ["running", "Running"], ["waiting", "Waiting"], ["ended", "Ended"]], which, (value) => set({ show: value }));
  const find = h("input", { class: "field", type: "search", placeholder: "Name, user, team or number", "aria-label": "Find a job", oninput: () => set({ find: find.value }) });
  const more = h("button", { class: "button", type: "button", hidden: true, onclick: () => { limit += MORE; show(); refresh(); } });
  const listCard = card("Jobs", "", h("div", {}, list, h("div", { class: "bar more" }, more)), "flush");
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Jobs"), tabs, h("a", { class: "button primary", href: "#/submit" }, "Submit a job"), h("div", { class: "find" }, find)), nothing, listCard);

  // What a row is made of, so that it stays while only its nodes change.
  const row = ({ id, name, user, team, state: now, phase, gpus, step, steps, loss, tokens_per_second, ran_seconds, submitted_ns, why }) =>
    ({ id, name, user, team, state: now, phase, gpus, step, steps, loss, tokens_per_second, ran_seconds, submitted_ns, why: { text: why.text } });

  const progress = (job) => {
    if (!job.steps) return h("td", {}, job.step ? `step ${whole(job.step)}` : "");
    return h("td", {}, h("span", { class: "nowrap" }, `${whole(job.step)} of ${whole(job.steps)}`),
      h("div", { class: "progress", role: "img", "aria-label": percent(job.step / job.steps, 0) }, h("div", { style: { width: `${Math.min(100, (100 * job.step) / job.steps)}%` } })));
  };

  // The address is the view: whoever opens it sees the same jobs.
  function read(from) {
    which = KINDS[from.get("show")] ? from.get("show") : "all";
    if (document.activeElement !== find) find.value = from.get("find") ?? "";
    tabs.mark(which);
  }

  function set(change) {
    const now = { show: which === "all" ? "" : which, find: find.value.trim(), ...change };
    go("jobs", { ...now, show: now.show === "all" ? "" : now.show }, true);
    which = now.show || "all";
    show();
    return jobs.length < Math.min(total, MOST) ? refresh() : null;
  }

  const all = () => which === "all" && !find.value.trim();

  function show() {
    const text = find.value.trim().toLowerCase();
    const fits = (job) => KINDS[which](job) && (!text || `${job.id} ${job.name} ${job.user} ${job.team}`.toLowerCase().includes(text));
    const found = jobs.filter(fits), count = all() ? Math.max(total, found.length) : found.length;
    listCard.note(`${counted(count, "job")}, newest first${total > MOST && (!all() || limit >= MOST) ? `, of the last ${whole(MOST)}; older ones are told by phalanx ps --all` : ""}`);
    more.hidden = count <= limit || limit >= MOST;
    setText(more, `${whole(count - limit)} more`);
    nothing.hidden = jobs.length > 0;
    listCard.hidden = !jobs.length;
    fill(list.body, found.slice(0, limit).map(row), (job) => job.id, (job) => rowLink(`#/job/${job.id}`,
      h("td", {}, h("a", { href: `#/job/${job.id}` }, `${job.id} ${job.name}`), h("div", { class: "faint small" }, job.user)),
      h("td", {}, state(job.state), job.phase && job.phase !== job.state ? h("div", { class: "faint small" }, job.phase) : ""),
      h("td", {}, job.team), h("td", { class: "num" }, whole(job.gpus)), progress(job),
      h("td", { class: "num" }, job.loss === null ? "" : short(job.loss)), h("td", { class: "num" }, job.tokens_per_second === null ? "" : short(job.tokens_per_second)),
      h("td", { class: "num" }, job.ran_seconds ? span(job.ran_seconds) : "–"), h("td", { class: "nowrap" }, moment(job.submitted_ns)),
      h("td", {}, h("span", { class: "clip", title: job.why.text }, job.why.text))));
  }

  // A table of the newest is asked for as long as nobody looks for others.
  async function refresh() {
    const most = all() ? Math.min(limit, MOST) : MOST;
    const [found, { jobs: states }] = await Promise.all([get(`/v1/jobs?state=all&limit=${most}&newest=true`), status()]);
    jobs = found.jobs.reverse();
    total = Object.values(states).reduce((a, b) => a + b, 0);
    show();
  }
  read(query);
  return { node, refresh, moved: (to) => { read(to); show(); } };
}
