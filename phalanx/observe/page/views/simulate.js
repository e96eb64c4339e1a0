// Results of scenarios: months of faults through the real core.
import { get, post } from "../lib/api.js";
import { ordered, tint } from "../lib/buckets.js";
import { CommandLine, shellWords } from "../lib/command.js";
import { card, empty, fill, figure, h, rowLink, setText, table } from "../lib/dom.js";
import { dollars, moment, percent, short, span, whole, words } from "../lib/format.js";

export function simulateView({ rest: [chosen = ""], go }) {
  const list = table(["result", "scenario", ["GPUs", "num"], ["days", "num"], ["seeds", "num"], ["goodput", "num"], ["ETTR", "num"], ["interruptions", "num"], "written"]);
  const folder = h("code");
  const none = empty("No results yet", h("p", {}, "Run one below, or put more here: ", h("code", {}, "phalanx simulate llama3-54d --json > FOLDER/llama3.json")), h("p", {}, "The folder is ", folder));
  const listCard = card("Results", "newest first", h("div", {}, none, list), "flush");
  const scenario = h("select", { class: "pick", "aria-label": "Scenario", onchange: () => tell() });
  const about = h("p", { class: "muted small" });
  const gpus = h("input", { class: "field", type: "number", min: 8, max: 4096, value: 256, "aria-label": "GPUs" });
  const days = h("input", { class: "field", type: "number", min: 0.1, max: 3, step: 0.1, value: 0.5, "aria-label": "Days" });
  const seed = h("input", { class: "field", type: "number", min: 0, value: 0, "aria-label": "Seed" });
  const said = h("p", { class: "muted small", role: "status" });
  const button = h("button", { class: "button primary" }, "Play");
  const line = new CommandLine();
  const form = h("form", { class: "sliders", onsubmit: play, oninput: () => tell() },
    h("label", { class: "slider" }, "Scenario", scenario), about, h("div", { class: "three" }, h("label", {}, "GPUs", gpus), h("label", {}, "Days", days), h("label", {}, "Seed", seed)), h("div", { class: "bar" }, button), said, line.node);
  const detail = h("div", { class: "grid", hidden: !chosen });
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, chosen ? `Simulation ${chosen}` : "Simulate"),
    chosen ? h("a", { href: "#/simulate" }, "All results") : "", h("p", {}, "The same core that runs the fleet, fed with virtual time and faults.")),
  detail, h("div", { class: "grid", hidden: Boolean(chosen) }, listCard, card("Play a small one", "longer ones: on the command line", form, "half")));
  let known = {};
  const tell = () => {
    setText(about, known[scenario.value] ?? "");
    line.set(shellWords("phalanx", "simulate", scenario.value, "--gpus", gpus.value, "--days", days.value, "--seed", seed.value));
  };

  async function play(event) {
    event.preventDefault();
    button.disabled = true;
    setText(said, "playing …");
    try {
      const made = await post("/v1/simulations", { scenario: scenario.value, gpus: Number(gpus.value), days: Number(days.value), seed: Number(seed.value) });
      if (made.report.problem) setText(said, made.report.problem);
      else go(`simulate/${made.name}`);
    } catch (problem) {
      setText(said, problem.message);
    } finally {
      button.disabled = false;
    }
  }

  async function refresh() {
    if (chosen) {
      if (!detail.childElementCount) show((await get(`/v1/simulations/${encodeURIComponent(chosen)}`)).report);
      return;
    }
    const found = await get("/v1/simulations");
    known = found.known;
    setText(folder, found.folder);
    fill(scenario, Object.keys(known), (name) => name, (name) => h("option", { value: name }, name));
    tell();
    none.hidden = found.results.length > 0;
    list.hidden = !found.results.length;
    fill(list.body, found.results, (each) => each.name, (each) => (each.problem
      ? h("tr", {}, h("td", {}, each.name), h("td", { colSpan: 8, class: "muted" }, each.problem))
      : rowLink(`#/simulate/${encodeURIComponent(each.name)}`, h("td", {}, h("a", { href: `#/simulate/${encodeURIComponent(each.name)}` }, each.name)), h("td", {}, each.scenario), h("td", { class: "num" }, whole(each.gpus)),
        h("td", { class: "num" }, short(each.days)), h("td", { class: "num" }, whole(each.seeds)), h("td", { class: "num" }, percent(each.goodput)), h("td", { class: "num" }, percent(each.ettr)),
        h("td", { class: "num" }, short(each.interruptions)), h("td", { class: "nowrap" }, moment(each.written_ns)))));
  }

  function show(report) {
    const { summary, seeds } = report;
    const { mean, least, greatest } = summary;
    const range = (key, format) => (summary.seeds > 1 ? `${format(least[key])} to ${format(greatest[key])} over ${summary.seeds} seeds` : "one seed");
    const figures = [["goodput", (v) => percent(v), "goodput"], ["ettr", (v) => percent(v), "of held time, in steps that were kept"], ["interruptions", short, "interruptions"],
      ["mtbf_hours", (v) => `${short(v)} h`, "between two of them"], ["mean_recovery_seconds", span, "until steps went on"], ["dollars", dollars, "price"]]
      .filter(([key]) => key in mean).map(([key, format, name]) => { const made = figure(name); made.set(format(mean[key]), "", range(key, format)); return made; });
    const shares = ordered(Object.fromEntries(Object.entries(summary.buckets).map(([name, share]) => [name, Math.round(share * 1e9)])));
    const rows = (entries, format) => entries.map(([name, value]) => h("tr", {}, h("td", {}, words(name)), h("td", { class: "num" }, format(value))));
    const small = (title, head, entries, format) => {
      if (!entries.length) return "";
      const made = table([head[0], [head[1], "num"]]);
      made.body.append(...rows(entries.sort(([, a], [, b]) => b - a).slice(0, 14), format));
      return card(title, "", made, "third flush");
    };
    detail.replaceChildren(
      card("In all", `${summary.scenario}, ${whole(seeds[0].gpus)} GPUs for ${short(seeds[0].days)} days${summary.violations ? `; ${whole(summary.violations)} violations` : "; no invariant was violated"}`, h("dl", { class: "figures" }, figures)),
      card("Where the GPU time went", "", h("div", { class: "steps" }, shares.map(([name, value]) => h("div", { class: "step", "data-name": name }, h("span", {}, words(name)),
        h("div", { class: "track" }, h("div", { class: "part", style: { width: `${Number(value) / 1e7}%`, background: tint(name) } })), h("span", { class: "value" }, percent(Number(value) / 1e9, 2)))))),
      small("Interruptions", ["cause", "times"], Object.entries(summary.by_cause), short), small("What formed gangs", ["decision", "times"], Object.entries(seeds[0].rungs), whole),
      small("Losses", ["cause", "GPU-hours"], Object.entries(seeds[0].lost_gpu_hours), short));
  }
  return { node, refresh };
}
