// Who used GPUs over time: by team, user or project; also as a file for a sheet.
import { get } from "./api.js";
import { card, fill, h, table } from "./dom.js";
import { dollars, gpuHours } from "./format.js";

const OWNERS = ["team", "user", "project"], STRETCHES = ["all", "day", "week", "month"];

export function usageCard() {
  const choice = (label, values, text) => h("select", { class: "pick", "aria-label": label, onchange: () => refresh() }, values.map((value) => h("option", { value }, text(value))));
  const by = choice("Usage by", OWNERS, (value) => `by ${value}`);
  const every = choice("Usage over time", STRETCHES, (value) => (value === "all" ? "in all" : `by ${value}`));
  const save = h("a", { download: "usage.csv", href: "#", class: "small" }, "CSV");
  const rows = table(["from", "whose", ["GPU time", "num"], ["price", "num"]]);
  const node = card("Usage", "who held GPUs, days of UTC", h("div", {}, h("div", { class: "bar usagebar" }, by, every, save), rows), "flush");

  async function refresh() {
    const { usage } = await get(`/v1/usage?by=${by.value}&every=${every.value}`);
    node.hidden = !usage.length;
    fill(rows.body, usage.toReversed(), (row) => `${row.start}/${row.owner}`, (row) => h("tr", {},
      h("td", { class: "muted" }, row.start || "–"), h("td", {}, row.owner || "–"),
      h("td", { class: "num" }, gpuHours(row.gpu_ns).join(" ")), h("td", { class: "num" }, dollars(row.dollars))));
    save.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(usage, by.value))}`;
  }
  return { node, refresh };
}

// A sheet takes what begins like this for a formula.
const cell = (text) => `"${/^[=+\-@]/.test(text) ? "'" : ""}${String(text).replaceAll('"', '""')}"`;

export function csv(usage, by) {
  const lines = usage.map((row) => [cell(row.start), cell(row.owner), row.gpu_hours.toFixed(4), row.dollars.toFixed(2), row.gpu_ns].join(","));
  return [`from,${by},gpu_hours,dollars,gpu_ns`, ...lines, ""].join("\r\n");
}
