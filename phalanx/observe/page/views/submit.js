// A job file written here: checked while one types, with its plan and price beside it, submitted with one button.
import { Refused, call, get, post, who } from "../lib/api.js";
import { CommandLine } from "../lib/command.js";
import { card, figure, h, setText } from "../lib/dom.js";
import { Editor, problemList, setSaid } from "../lib/editor.js";
import { counted, dollars, percent, short, span, whole } from "../lib/format.js";

const KEPT = "phalanx-draft";
const WAIT_MS = 350;
const STARTER = `name = "my-run"

[model]
preset = "tiny"

[data]
source = "synthetic"
sequence = 256

[parallel]
data = 2

[train]
steps = 200
global_batch = 16
micro_batch = 4
device = "cpu"

[checkpoint]
every = 50
`;
const AS_FILE = "as the file says";
const POWERS = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 2 ** (from + i));
const SLIDERS = [
  ["gpus", "GPUs", [0, ...POWERS(0, 14)], whole], ["tensor", "Tensor parallel", [0, ...POWERS(0, 6)], whole], ["pipeline", "Pipeline stages", [0, ...POWERS(0, 6)], whole],
  ["context", "Context parallel", [0, ...POWERS(0, 5)], whole], ["expert", "Expert parallel", [0, ...POWERS(0, 6)], whole],
  ["every", "A checkpoint every … steps", [0, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000], whole],
];
const PRECISIONS = ["float32", "bfloat16", "float16", "fp8"];
const between = (range, unit, show) => `${show(range.low / unit)} to ${show(range.high / unit)}`;

export function submitView({ go, query }) {
  const values = Object.fromEntries([...SLIDERS.map(([name]) => name), "precision"].map((name) => [name, name === "precision" ? query.get(name) ?? "" : Number(query.get(name) ?? 0)]));
  const options = { folder: "", minutes: 0, priority: 0, held: false };
  let timer = 0, serial = 0, loaded = false, draft = null, me = null, key = "";
  const editor = new Editor("Job file", () => changed());
  const problems = problemList((line) => editor.show(line));
  const said = h("p", { class: "small muted", role: "status" });
  const line = new CommandLine();
  const button = h("button", { class: "button primary", type: "button", disabled: true, onclick: () => send() }, "Submit");
  const ask = h("label", { class: "notice", hidden: true });
  const confirmed = h("input", { type: "checkbox", onchange: () => ready() });
  const figures = Object.fromEntries([["step", "a step"], ["time", "time"], ["money", "price"], ["hours", "GPU-hours"], ["memory", "memory of a GPU"], ["gang", "gang"]].map(([key, name]) => [key, figure(name)]));
  const mapping = h("p", { class: "small muted" });
  const plan = card("What it takes", "", h("div", {}, h("dl", { class: "figures" }, Object.values(figures)), mapping));

  const slider = ([name, label, steps, show]) => {
    const output = h("output", {}), id = `draft-${name}`;
    const text = (value) => (value ? show(value) : AS_FILE);
    const range = h("input", { type: "range", id, min: 0, max: steps.length - 1, step: 1, value: Math.max(0, steps.indexOf(values[name])), oninput: () => { values[name] = steps[Number(range.value)]; tell(); changed(); } });
    const tell = () => { setText(output, text(values[name])); range.setAttribute("aria-valuetext", text(values[name])); };
    tell();
    return h("div", { class: "slider" }, h("label", { for: id }, label, output), range);
  };
  const precision = h("select", { class: "pick", id: "draft-precision", onchange: () => { values.precision = precision.value; changed(); } },
    h("option", { value: "" }, AS_FILE), PRECISIONS.map((name) => h("option", { value: name, selected: name === values.precision }, name)));
  const field = (name, label, attributes) => {
    const input = h("input", { class: attributes.type === "checkbox" ? "" : "field", ...attributes, oninput: () => {
      options[name] = attributes.type === "checkbox" ? input.checked : attributes.type === "number" ? Number(input.value) : input.value.trim();
      changed();
    } });
    return h("label", { class: attributes.type === "checkbox" ? "tick" : "" }, attributes.type === "checkbox" ? [input, ` ${label}`] : [label, input]);
  };
  const what = card("What if", "laid over the file, like --set", h("div", { class: "sliders" }, SLIDERS.map(slider),
    h("div", { class: "slider" }, h("label", { for: "draft-precision" }, "Precision"), precision)));
  const beside = h("details", { class: "fold" }, h("summary", {}, "Folder, time limit, priority, hold"), h("div", { class: "asked" },
    field("folder", "Folder on the nodes", { type: "text", placeholder: "/shared/me" }), field("minutes", "Time limit, minutes", { type: "number", min: 0, placeholder: "none" }),
    field("priority", "Priority", { type: "number", placeholder: "0" }), field("held", "hold it until it is released", { type: "checkbox" })));
  const file = card("Job file", "checked by the server as you type", h("div", {}, editor.node, problems, beside));
  const act = card("Submit", "", h("div", { class: "submit" }, said, ask, h("div", { class: "bar" }, button), line.node));
  const node = h("div", {}, h("div", { class: "title" }, h("a", { href: "#/jobs" }, "Jobs"), h("span", { class: "faint" }, "/"), h("h1", {}, "Submit")),
    h("div", { class: "drafting" }, file, h("div", { class: "side" }, plan, what, act)));

  function changed() {
    try { sessionStorage.setItem(KEPT, editor.value); } catch { /* then it lasts as long as this page */ }
    draft = null;
    plan.classList.add("pale");
    ready();
    clearTimeout(timer);
    timer = setTimeout(check, WAIT_MS);
  }

  function settings() {
    const found = [];
    for (const name of ["tensor", "pipeline", "context", "expert"]) if (values[name]) found.push(`parallel.${name}=${values[name]}`);
    if (values.gpus || found.length) found.push("parallel.data=0"); // whatever the other axes leave
    if (values.precision) found.push(`precision.fp8=${values.precision === "fp8"}`, `precision.compute=${values.precision === "fp8" ? "bfloat16" : values.precision}`);
    if (values.every) found.push(`checkpoint.every=${values.every}`);
    return found;
  }

  async function check() {
    const mine = ++serial;
    go("submit", Object.fromEntries(Object.entries(values).filter(([, value]) => value)), true);
    setSaid(said, "checking …", "muted");
    try {
      const found = await post("/v1/drafts", { toml: editor.value, settings: settings(), gpus: values.gpus, ...options });
      if (mine === serial) show(found);
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      if (mine === serial) setSaid(said, problem.message, "bad");
      if (mine === serial && problem.status === 429) timer = setTimeout(check, 2000);
    }
  }

  function show(found) {
    draft = found.problems.length ? null : found;
    key = [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
    editor.mark(found.problems);
    problems.show(found.problems);
    line.set(found.command);
    file.note(found.problems.length ? counted(found.problems.length, "mistake") : "it can run");
    ask.hidden = !found.ask;
    ask.replaceChildren(confirmed, h("span", {}, `Yes: ${found.ask}`));
    confirmed.checked = false;
    plan.classList.toggle("pale", !draft);
    if (draft) price(found);
    ready();
    node.dataset.checked = String(serial);
  }

  function price({ plan: made, estimate, ranks, nodes }) {
    const none = made?.problem || "not planned";
    figures.gang.set(whole(ranks), ranks === 1 ? "rank" : "ranks", counted(nodes, "slot"));
    figures.step.set(made?.step_ns ? span(made.step_ns.mid / 1e9) : "–", "", made?.step_ns ? between(made.step_ns, 1e9, span) : "");
    figures.time.set(made?.run_seconds ? span(made.run_seconds.mid) : "–", "", made?.run_seconds ? between(made.run_seconds, 1, span) : "");
    figures.money.set(estimate ? dollars(estimate.dollars) : "–", "", made?.micro_dollars ? between(made.micro_dollars, 1e6, dollars) : estimate?.by_limit ? "at most, by its time limit" : "");
    figures.hours.set(estimate ? short(estimate.gpu_hours) : "–", "", made?.watt_hours ? `${short(made.watt_hours.mid / 1e3)} kWh` : "");
    const { memory_bytes: used = 0, memory_limit_bytes: most = 0 } = made ?? {};
    figures.memory.set(most ? percent(used / most, 0) : "–", "", most ? `${(used / 2 ** 30).toFixed(1)} of ${(most / 2 ** 30).toFixed(0)} GiB` : "", most && used > most ? "bad" : "");
    plan.note(made?.mapping ? `on ${made.device}, with 80 % intervals` : "");
    setText(mapping, made?.mapping ? `${made.mapping}${made.chosen?.length ? `; chosen: ${made.chosen.join(", ")}` : ""}` : none);
  }

  // Who may not submit reads why; the command is there all the same.
  function ready() {
    const may = me && me.token.role !== "read";
    button.disabled = !draft || !may || (draft.ask && !confirmed.checked);
    if (me && !may) setSaid(said, "Your token may look, not submit: it has the role of a reader.", "muted");
    else if (!draft) setSaid(said, problems.children.length ? "Nothing can be submitted while there are mistakes." : "checking …", "muted");
    else setSaid(said, draft.ask ? "The policy wants a yes for what this costs." : `As ${me?.token.name ?? "you"}${me?.token.team ? `, for team ${me.token.team}` : ""}.`, "muted");
  }

  async function send() {
    const { submission } = draft;
    button.disabled = true;
    try {
      const body = JSON.stringify({ ...submission, confirmed: confirmed.checked });
      const done = await (await call("/v1/jobs", { method: "POST", body, key })).json(); // an answer that was lost is asked for again, and no second job made
      try { sessionStorage.removeItem(KEPT); } catch { /* it was not kept */ }
      go(`job/${done.jobs[0]}`);
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      ready();
      setSaid(said, problem.message, "bad");
    }
  }

  async function begin() {
    let text = "";
    try { text = sessionStorage.getItem(KEPT) ?? ""; } catch { /* storage may be forbidden */ }
    const from = Number(query.get("from"));
    if (from) {
      const { spec } = await get(`/v1/jobs/${from}`);
      const work = JSON.parse(spec.payload || "{}");
      text = work.toml ?? text;
      options.folder = work.folder ?? "";
      beside.querySelector("input").value = options.folder;
    }
    editor.value = text || STARTER;
    await check();
  }

  async function refresh() {
    if (loaded) return; // nothing of the cluster changes a draft
    loaded = true;
    me = await who();
    await begin();
  }
  return { node, refresh, close: () => clearTimeout(timer) };
}
