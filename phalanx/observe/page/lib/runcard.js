// Where a run comes from: code, data, packages, seeds; what people wrote about it.
import { h, table, fill } from "./dom.js";
import { counted, moment, span } from "./format.js";

const brief = (hash) => String(hash ?? "").slice(0, 12);
const commit = (code) => (code ? `${brief(code.commit)}${code.dirty ? `, with changes ${brief(code.diff_sha256)}` : ""}` : "");

export class RunCard {
  constructor() {
    this.facts = h("dl", { class: "pair" });
    this.places = table(["generation", "since", "replicas", "nodes"]);
    this.tags = h("p", { class: "bar" });
    this.notes = h("ul", { class: "list" });
    this.node = h("div", { class: "run" }, this.facts, h("details", { class: "fold" }, h("summary", {}, "Placements"), this.places), this.tags, this.notes);
  }

  show(run) {
    const from = run.provenance, torch = from.torch ?? {};
    const rows = [
      ["started by", [run.user, run.team].filter(Boolean).join(", ")], ["project", commit(from.project)], ["Phalanx", [from.phalanx, commit(from.code)].filter(Boolean).join(", ")],
      ["Python, torch", [from.python, torch.version, torch.cuda && `CUDA ${torch.cuda}`, torch.nccl && `NCCL ${torch.nccl}`].filter(Boolean).join(", ")],
      ["packages", from.packages ? counted(Object.keys(from.packages).length, "package") : ""], ["driver, image", [from.driver, from.image].filter(Boolean).join(", ")],
      ...Object.entries(from.data ?? {}).map(([name, value]) => [name.replace(".", " "), /^[0-9a-f]{40,}$/.test(value) ? brief(value) : value]),
      ["seeds", Object.entries(from.seeds ?? {}).map(([name, seed]) => `${name} ${seed}`).join(", ")], ["continues", from.parent_checkpoint], ["folder", run.folder],
      ["ran", run.ended ? `${moment(run.created * 1e9)} to ${moment(run.ended * 1e9)}, ${span(run.ended - run.created)}` : `since ${moment(run.created * 1e9)}`], ["end", run.exit.message ?? run.exit.reason],
    ].filter(([, value]) => value);
    fill(this.facts, rows.flatMap(([name, value]) => [["dt", name], ["dd", value]]), ([tag, text]) => tag + text, ([tag, text]) => h(tag, {}, text));
    this.node.querySelector("details").hidden = !run.placements.length;
    fill(this.places.body, run.placements.slice(-50).toReversed(), (each) => each.generation, (each) => h("tr", {}, h("td", {}, each.generation), h("td", { class: "nowrap" }, moment(each.time * 1e9)), h("td", {}, each.replicas),
      h("td", {}, each.nodes.length > 8 ? `${each.nodes.slice(0, 8).join(", ")} and ${each.nodes.length - 8} more` : each.nodes.join(", "))));
    fill(this.tags, run.tags, (tag) => tag, (tag) => h("span", { class: "tag" }, tag));
    fill(this.notes, run.notes, (note) => note.time + note.text, (note) => h("li", {}, h("time", {}, moment(note.time * 1e9)), note.by ? `${note.by}: ` : "", note.text));
  }
}
