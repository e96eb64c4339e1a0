// Runs side by side: their curves over each other, and exactly what differs between them.
import { get } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { card, empty, fill, h, segmented, table } from "../lib/dom.js";
import { percent, short, span, whole, words } from "../lib/format.js";
import { seriesColour } from "../lib/theme.js";

const CURVES = [["loss", "Loss", short], ["tokens_per_second", "Tokens per second", short], ["mfu", "MFU", (v) => percent(v)], ["grad_norm", "Gradient norm", short], ["validation_loss", "Loss on unseen text", short], ["step_seconds", "Step time", span]];
const MOST = 6;
const told = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export function compareView({ go, query }) {
  let chosen = (query.get("jobs") ?? "").split(",").map(Number).filter(Boolean).slice(0, MOST);
  let asked = chosen.length > 0; // otherwise the two newest that made steps are shown
  let axis = "step";
  const group = [];
  const charts = CURVES.map(([name, label, format]) => [name, new Chart({ label, format, group })]);
  const cards = charts.map(([, chart], i) => card(CURVES[i][1], "", chart.node, "half"));
  const picks = h("ul", { class: "picks" });
  const legend = h("div", { class: "legend" });
  const differs = table(["what", "", ""]);
  const differsCard = card("What differs", "", differs, "flush");
  const none = empty("Choose two runs", "Their curves are drawn over each other, and every setting, package and commit that differs is listed.");
  const tabs = segmented("Over", [["step", "Over steps"], ["time", "Over time"]], axis, (value) => { axis = value; draw(); });
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Compare"), tabs),
    h("div", { class: "grid" }, card("Runs", `up to ${MOST}`, h("div", {}, picks, legend)), none,
      ...cards, differsCard));
  let curves = [];

  const toggle = (id) => {
    chosen = chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id].slice(-MOST);
    go("compare", { jobs: chosen.join(",") }, true);
    refresh();
  };

  function draw() {
    charts.forEach(([name, chart], i) => {
      chart.options.x = axis === "time" ? "after" : "step";
      chart.options.formatX = axis === "time" ? span : whole;
      chart.show(curves.flatMap(({ id, series }, i) => {
        const one = series[name];
        if (!one?.step.length) return [];
        const x = axis === "time" ? one.time.map((time) => time - one.time[0]) : one.step;
        return [{ name: `job ${id}`, x, y: one.value, colour: seriesColour(i) }];
      }));
      cards[i].hidden = !curves.some(({ series }) => series[name]?.value.some((value) => value !== null));
    });
  }

  async function refresh() {
    const { jobs } = await get("/v1/jobs?state=all&limit=100&newest=true");
    if (!asked && !chosen.length) chosen = jobs.filter((job) => job.step > 0).slice(-2).map((job) => job.id);
    asked = true;
    fill(picks, jobs.toReversed().slice(0, 40).map((job) => [job.id, job.name, job.state, chosen.includes(job.id)]), ([id]) => id, ([id, name, state, on]) =>
      h("li", {}, h("label", { class: "tag" }, h("input", { type: "checkbox", checked: on, onchange: () => toggle(id) }), ` ${id} ${name}`, h("span", { class: "faint" }, state))));
    const names = new Map(jobs.map((job) => [job.id, job.name]));
    const known = chosen.filter((id) => names.has(id));
    curves = await Promise.all(known.map(async (id) => ({
      id, series: (await get(`/v1/jobs/${id}/metrics?names=${CURVES.map(([name]) => name).join(",")}&points=600`)).series,
    })));
    none.hidden = known.length > 1;
    fill(legend, known.map((id, i) => [id, names.get(id), i]), ([id]) => id, ([id, name, i]) =>
      h("span", { class: "key" }, h("span", { class: "swatch", style: { background: seriesColour(i) } }), h("a", { href: `#/job/${id}` }, `job ${id} ${name}`)));
    draw();
    await showDifferences(known);
  }

  async function showDifferences(ids) {
    differsCard.hidden = ids.length !== 2;
    if (ids.length !== 2) return;
    const { differences: rows } = await get(`/v1/runs/diff?a=${ids[0]}&b=${ids[1]}`);
    differs.querySelectorAll("th").forEach((cell, i) => { if (i) cell.textContent = `job ${ids[i - 1]}`; });
    differsCard.note(rows.length ? `${rows.length} of everything that was recorded` : "nothing that was recorded differs");
    fill(differs.body, rows, (row) => `${row.section}.${row.key}`, (row) => h("tr", {}, h("td", {}, row.key, h("div", { class: "faint small" }, words(row.section))),
      h("td", { class: "mono" }, told(row.a)), h("td", { class: "mono" }, told(row.b))));
  }
  return { node, refresh, repaint: draw, close: () => group.forEach((chart) => chart.close()) };
}
