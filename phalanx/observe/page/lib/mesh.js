// Which rank holds which stage and shard, on which node. Ranks are laid out pipeline, data,
// context, tensor; tensor is innermost.
import { h } from "./dom.js";
import { counted } from "./format.js";

const MOST_REPLICAS = 64;

export function ranksOf(gang, replicas, stage, replica) {
  const inner = (gang.tensor ?? 1) * (gang.context ?? 1);
  const first = (stage * replicas + replica) * inner;
  return Array.from({ length: inner }, (_, i) => first + i);
}

export function meshNode(gang, replicas, nodes, stateOf) {
  const stages = gang.pipeline ?? 1, slot = gang.slot_gpus ?? 1;
  const tensor = gang.tensor ?? 1, context = gang.context ?? 1;
  const nodeOf = (rank) => nodes[slot ? Math.floor(rank / slot) : rank] ?? "";
  const cell = (stage, replica) => {
    const ranks = ranksOf(gang, replicas, stage, replica);
    const names = [...new Set(ranks.map(nodeOf))].filter(Boolean);
    const lost = names.some((name) => ["dead", "quarantined", "suspect"].includes(stateOf(name)));
    const told = ranks.length > 1 ? `ranks ${ranks[0]}–${ranks[ranks.length - 1]}` : `rank ${ranks[0]}`;
    return h("td", { class: lost ? "lost" : "" }, told,
      names.slice(0, 4).map((name) => h("small", {}, h("a", { href: `#/node/${encodeURIComponent(name)}` }, name))),
      names.length > 4 ? h("small", {}, `and ${names.length - 4} more`) : "");
  };
  const shown = Math.min(replicas, MOST_REPLICAS);
  const head = h("tr", {}, h("th", {}, ""), Array.from({ length: shown }, (_, i) => h("th", { scope: "col" }, `replica ${i}`)));
  const rows = Array.from({ length: stages }, (_, stage) => h("tr", {},
    h("th", { scope: "row" }, stages > 1 ? `stage ${stage}` : "all layers"), Array.from({ length: shown }, (_, i) => cell(stage, i))));
  const axes = [["pipeline", stages], ["data", replicas], ["context", context], ["tensor", tensor]].filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
  const inside = tensor * context > 1 ? ` In a cell, tensor shard t of context shard c is rank first + c × ${tensor} + t.` : "";
  return h("div", { class: "mesh" },
    h("p", { class: "muted small" }, `${axes.join(" × ") || "one rank"}.${inside}`),
    h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows))),
    replicas > shown ? h("p", { class: "faint small" }, `and ${counted(replicas - shown, "replica")} more`) : "");
}
