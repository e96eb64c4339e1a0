// The planner with sliders: what a model would take on a cluster, before anybody pays for it.
import { get, post } from "../lib/api.js";
import { card, fill, figure, h, setText, table } from "../lib/dom.js";
import { dollars, percent, short, span, whole, words } from "../lib/format.js";
import { bars } from "../lib/waterfall.js";

const POWERS = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 2 ** (from + i));
const TOKENS = ["10G", "30G", "100G", "300G", "1T", "2T", "5T", "10T", "15T", "30T"];
const AXES = ["auto", 1, 2, 4, 8, 16, 32, 64];
const WAIT_MS = 250;
const SMALL = new Set(["matmul", "attention", "elementwise"]);

export const mappingText = (m) => [["tensor", "TP"], ["context", "CP"], ["pipeline", "PP"], ["expert", "EP"], ["data", "DP"]]
  .filter(([key]) => m[key] > 1).map(([key, name]) => `${name}${m[key]}`).join(" × ") || "one GPU";

export function planView({ go, query }) {
  const asked = (name, start) => query.get(name) ?? start;
  const values = {
    model: asked("model", "llama3-70b"), gpu: asked("gpu", "h100"), gpus: Number(asked("gpus", 1024)), tokens: asked("tokens", "2T"),
    sequence: Number(asked("sequence", 8192)), precision: asked("precision", ""), tensor: asked("tensor", "auto"), pipeline: asked("pipeline", "auto"), context: asked("context", "auto"),
  };
  let timer = 0, serial = 0, loaded = false;
  const model = h("select", { class: "pick", id: "plan-model", onchange: () => set("model", model.value) });
  const gpu = h("select", { class: "pick", id: "plan-gpu", onchange: () => set("gpu", gpu.value) });
  const precision = h("select", { class: "pick", id: "plan-precision", onchange: () => set("precision", precision.value) });
  const slider = (name, label, steps, show) => {
    const output = h("output", {});
    const range = h("input", { type: "range", id: `plan-${name}`, min: 0, max: steps.length - 1, step: 1, oninput: () => { tell(); set(name, steps[Number(range.value)]); } });
    const tell = () => { const value = steps[Number(range.value)]; setText(output, show(value)); range.setAttribute("aria-valuetext", show(value)); };
    const at = steps.findIndex((each) => String(each) === String(values[name]));
    range.value = String(Math.max(0, at));
    values[name] = steps[Math.max(0, at)];
    tell();
    return h("div", { class: "slider" }, h("label", { for: `plan-${name}` }, label, output), range);
  };
  const axis = (value) => (value === "auto" ? "the planner chooses" : String(value));
  const controls = h("div", { class: "sliders" },
    h("div", { class: "slider" }, h("label", { for: "plan-model" }, "Model"), model), h("div", { class: "slider" }, h("label", { for: "plan-gpu" }, "GPU"), gpu),
    slider("gpus", "GPUs", POWERS(3, 17), whole), slider("tokens", "Tokens to train on", TOKENS, String), slider("sequence", "Tokens in a sample", POWERS(11, 17), whole),
    h("div", { class: "slider" }, h("label", { for: "plan-precision" }, "Precision"), precision),
    slider("tensor", "Tensor parallel", AXES, axis), slider("pipeline", "Pipeline stages", AXES, axis), slider("context", "Context parallel", AXES.slice(0, 6), axis));
  const figures = Object.fromEntries([["mfu", "MFU"], ["speed", "tokens per second"], ["days", "days"], ["money", "price"], ["memory", "memory of the fullest GPU"], ["goodput", "goodput with failures"]].map(([key, name]) => [key, figure(name)]));
  const problem = h("div", { class: "notice", role: "alert", hidden: true });
  const step = h("div");
  const stepCard = card("Where a step goes", "", step);
  const others = table(["mapping", "schedule", ["ZeRO", "num"], ["micro-batch", "num"], ["step", "num"], ["memory", "num"]]);
  const result = h("div", { class: "grid" }, card("The best plan", "", h("dl", { class: "figures" }, Object.values(figures))), stepCard, card("Nearly as good", "", others, "flush"));
  const resultHead = result.firstElementChild;
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Plan"), h("p", {}, "Move a slider: the planner searches every mapping again. Nothing is started.")),
    h("div", { class: "planner" }, card("The question", "", controls), h("div", {}, problem, result)));

  function set(name, value) {
    values[name] = value;
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  }

  async function ask() {
    const mine = ++serial;
    go("plan", values, true);
    const body = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "auto" && value !== ""));
    const found = await post("/v1/plan", { ...body, gpus: Number(body.gpus), sequence: String(body.sequence),
      ...Object.fromEntries(["tensor", "pipeline", "context"].filter((name) => body[name]).map((name) => [name, Number(body[name])])) });
    if (mine === serial) show(found);
  }

  function show(plan) {
    problem.hidden = !plan.problem;
    problem.replaceChildren(h("span", {}, plan.problem));
    result.classList.toggle("pale", Boolean(plan.problem));
    const best = plan.prediction;
    if (!best) return;
    resultHead.note(`${mappingText(best.mapping)}, ${best.mapping.schedule}, ${best.mapping.precision}; ${short(plan.parameters)} parameters; ${whole(plan.considered)} mappings considered in ${span(plan.search_seconds)}`);
    figures.mfu.set(percent(best.mfu), "", `bound by ${words(best.bound_by)}`);
    figures.speed.set(short(best.tokens_per_second), "", `${short(best.tokens_per_second / best.gpus)} a GPU`);
    figures.days.set(plan.days.mid.toFixed(plan.days.mid < 10 ? 1 : 0), "", `${plan.days.low.toFixed(1)} to ${plan.days.high.toFixed(1)}`);
    figures.money.set(dollars(plan.dollars.mid), "", `${dollars(plan.dollars_per_million_tokens)} a million tokens`);
    figures.memory.set(percent(best.memory_bytes / best.memory_limit, 0), "", `${(best.memory_bytes / 2 ** 30).toFixed(1)} of ${(best.memory_limit / 2 ** 30).toFixed(0)} GiB`, best.memory_bytes > 0.95 * best.memory_limit ? "warn" : "");
    figures.goodput.set(percent(plan.goodput.mid), "", `${plan.failures_per_day.toFixed(2)} failures a day, ${whole(plan.spare_nodes)} spare nodes, checkpoint every ${span(plan.checkpoint_seconds)}`);
    const parts = Object.entries(best.parts).filter(([, value]) => value > best.step_seconds * 1e-4).sort(([, a], [, b]) => b - a)
      .map(([name, value]) => ({ name, value, tone: SMALL.has(name) ? "good" : name === "straggler" || name === "bubble" ? "bad" : "warn" }));
    step.replaceChildren(bars([...parts, { name: "step", value: best.step_seconds, tone: "accent", whole: true }], best.step_seconds, (value) => [span(value), h("small", {}, percent(value / best.step_seconds, 1))]));
    stepCard.note(`${span(best.step_seconds)} a step, 80 % interval ${span(best.step_seconds_low)} to ${span(best.step_seconds_high)}${plan.assumed.length ? `; assumed: ${plan.assumed.join("; ")}` : ""}`);
    fill(others.body, plan.alternatives, (each) => JSON.stringify(each.mapping), (each) => h("tr", {},
      h("td", { class: "nowrap" }, mappingText(each.mapping)), h("td", {}, `${each.mapping.schedule}${each.mapping.virtual_stages > 1 ? ` × ${each.mapping.virtual_stages}` : ""}${each.mapping.recompute !== "none" ? `, ${each.mapping.recompute} recompute` : ""}${each.mapping.offload !== "none" ? `, ${words(each.mapping.offload)} offloaded` : ""}`), h("td", { class: "num" }, each.mapping.zero), h("td", { class: "num" }, each.mapping.micro_batch),
      h("td", { class: "num" }, `${span(each.step_seconds)} (+${percent(each.step_seconds / best.step_seconds - 1, 1)})`), h("td", { class: "num" }, `${(each.memory_bytes / 2 ** 30).toFixed(1)} GiB`)));
    node.dataset.planned = String(serial);
  }

  async function refresh() {
    if (loaded) return; // nothing of the cluster changes a plan
    loaded = true;
    const known = await get("/v1/plan/choices");
    const options = (select, names, chosen, first) => select.replaceChildren(...(first ? [h("option", { value: "" }, first)] : []), ...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    options(model, known.models, values.model);
    options(gpu, known.gpus, values.gpu);
    options(precision, known.precisions, values.precision, "as usual");
    values.model = model.value;
    values.gpu = gpu.value;
    values.precision = precision.value;
    await ask();
  }
  return { node, refresh };
}
