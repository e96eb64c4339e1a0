// What differs between two runs: settings, code, data, packages, seeds.
import { get } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { card, fill, h, table } from "./dom.js";
import { counted, words } from "./format.js";

const told = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export class RunDifferences {
  constructor() {
    this.rows = table(["what", "", ""]);
    this.line = new CommandLine();
    this.node = card("What differs", "", h("div", {}, this.rows, h("div", { class: "under" }, this.line.node)), "flush");
  }

  async show(runs) {
    this.node.hidden = runs.length !== 2;
    if (runs.length !== 2) return;
    const [a, b] = runs.map((run) => run.job);
    const { differences } = await get(`/v1/runs/diff?a=${a}&b=${b}`);
    this.rows.querySelectorAll("th").forEach((cell, i) => { if (i) cell.textContent = `run ${runs[i - 1].job}`; });
    this.node.note(differences.length ? `${counted(differences.length, "thing")} of everything that was recorded: settings, code, data, packages, seeds` : "nothing that was recorded differs");
    this.line.set(shellWords("phalanx", "runs", "diff", a, b));
    let section = "";
    const rows = differences.flatMap((row) => (row.section === section ? [row] : [{ head: (section = row.section) }, row]));
    fill(this.rows.body, rows, (row) => row.head ?? `${row.section}.${row.key}`, (row) => (row.head
      ? h("tr", { class: "group" }, h("td", { colspan: 3 }, h("strong", {}, words(row.head))))
      : h("tr", {}, h("td", {}, row.key), h("td", { class: "mono" }, told(row.a)), h("td", { class: "mono" }, told(row.b)))));
  }
}
