// Runs: found, grouped and marked in a table; those chosen drawn over each other, with exactly what differs.
import { get, who } from "../lib/api.js";
import { card, empty, fill, h, segmented, setText } from "../lib/dom.js";
import { counted } from "../lib/format.js";
import { Overlay } from "../lib/overlay.js";
import { RunDifferences } from "../lib/rundiff.js";
import { RunLabels } from "../lib/runlabels.js";
import { RunTable } from "../lib/runtable.js";
import { SavedViews } from "../lib/savedviews.js";

const MOST = 8;
const OLD_MS = 4000; // a table of a thousand runs is not asked for with every step
const AXES = [["step", "Steps"], ["tokens", "Tokens"], ["time", "Time"], ["flops", "FLOPs"]];
const GROUPS = [["", "no groups"], ["state", "state"], ["team", "team"], ["user", "user"], ["tag", "tag"]];

export function runsView({ go, query }) {
  let chosen = [], asked = false, runs = [], at = 0;
  let shown = {}; // what the address says
  const find = h("input", { class: "field", type: "search", placeholder: "state=done learning_rate>1e-4 baseline", "aria-label": "Filter runs", oninput: () => set({ find: find.value }) });
  const group = h("select", { class: "pick", "aria-label": "Group by", onchange: () => set({ group: group.value }) });
  const views = new SavedViews("runs");
  const table = new RunTable((order) => set({ sort: order }), (job) => toggle(job));
  const tableCard = card("Runs", "", h("div", {}, h("div", { class: "bar runbar" }, find, group), table.node), "flush");
  const overlay = new Overlay((change) => set(change));
  const axis = segmented("Over", AXES, "step", (value) => set({ axis: value }));
  const labels = new RunLabels((job) => toggle(job), () => refresh(true));
  const differs = new RunDifferences();
  const first = empty("No run yet", h("p", {}, h("a", { href: "#/submit" }, "Submit a job"), ": its settings, results and curves are kept here."));
  first.hidden = true;
  const none = empty("Choose runs in the table", "Their curves are drawn over each other; of two, every setting, commit and shard of data that differs is listed.");
  const curves = h("div", { class: "grid" }, card("Chosen", `up to ${MOST}`, labels.node), none, overlay.node, differs.node);
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Runs"), axis, views.node), first, h("div", { class: "grid runs" }, tableCard, curves));

  // The address is the view: whoever opens it sees the same.
  function read(from) {
    shown = Object.fromEntries(["jobs", "find", "group", "sort", "axis", "smooth", "metrics", "zoom", "all", "bands"].map((name) => [name, from.get(name) ?? ""]));
    chosen = shown.jobs.split(",").map(Number).filter(Boolean).slice(0, MOST);
    if (document.activeElement !== find) find.value = shown.find;
    axis.mark(shown.axis || "step");
    overlay.read(shown);
  }

  function set(change) {
    Object.assign(shown, change);
    go("runs", Object.fromEntries(Object.entries(shown).filter(([, value]) => value)), true);
    read(new URLSearchParams(location.hash.split("?")[1] ?? ""));
    list();
    draw();
  }

  function toggle(job) {
    chosen = chosen.includes(job) ? chosen.filter((each) => each !== job) : [...chosen, job].slice(-MOST);
    set({ jobs: chosen.join(",") });
  }

  function list() {
    const count = table.show(runs, { find: shown.find, group: shown.group, sort: shown.sort, chosen });
    tableCard.note(`${counted(count, "run")}${count < runs.length ? ` of ${runs.length}` : ""}; a filter is words, or conditions such as mfu>0.4 and tag=baseline`);
  }

  async function draw() {
    const rows = chosen.map((job) => runs.find((run) => run.job === job)).filter(Boolean);
    none.hidden = rows.length > 0;
    labels.show(rows, (await who()).token.role);
    await Promise.all([overlay.show(rows), differs.show(rows)]);
    node.dataset.drawn = rows.map((run) => run.job).join();
  }

  async function refresh(forced = false) {
    if (asked && !forced && Date.now() - at < OLD_MS) return;
    const [found] = await Promise.all([get("/v1/runs/table"), views.refresh()]);
    at = Date.now();
    runs = found.rows;
    table.settings = found.settings;
    fill(group, [...GROUPS, ...found.settings.map((key) => [key, key])], ([value]) => value, ([value, text]) => h("option", { value }, value ? `by ${text}` : text));
    if (!asked) read(query);
    if (!asked && !chosen.length) chosen = runs.filter((run) => run.last.step > 0).slice(-2).map((run) => run.job);
    asked = true;
    first.hidden = runs.length > 0;
    node.lastElementChild.hidden = !runs.length;
    group.value = shown.group;
    list();
    await draw();
  }
  return { node, refresh, moved: (to) => { if (asked) { read(to); group.value = shown.group; list(); draw(); } }, repaint: () => overlay.repaint(), close: () => overlay.close() };
}
