// Alerts: rules in plain words, who is told, what they told; silences, and a button that tries them.
import { actionButton, refusedTo } from "../lib/actions.js";
import { Refused, call, get, post, who } from "../lib/api.js";
import { CommandLine, shellWords } from "../lib/command.js";
import { card, empty, fill, h, setText, table } from "../lib/dom.js";
import { counted, moment, words } from "../lib/format.js";

const KINDS = [
  ["finding", "something is found", "loss_spike"], ["goodput_below", "goodput falls below", 0.9], ["budget_above", "a budget is used up to", 0.8], ["node_flapping", "a node is lost again and again", 3],
];
const LOOKS_BACK = new Set(["goodput_below", "node_flapping"]); // over so many minutes
const SILENCE_MINUTES = 60;
const share = (kind) => kind === "goodput_below" || kind === "budget_above";
const path = (name, ...rest) => ["/v1/alerts", encodeURIComponent(name), ...rest].join("/");

export function alertsView() {
  const rules = table(["alert", "when", "tells", "now", ""]);
  const none = empty("No alert is set", "Write the first one here: whoever you name is notified as soon as it is true.");
  const rulesCard = card("Rules", "", h("div", {}, none, rules), "flush");
  const fired = h("ul", { class: "list" });
  const nothing = h("p", { class: "muted" }, "Nothing so far.");
  const firedCard = card("Sent", "newest first", h("div", {}, nothing, fired), "half");
  const said = h("p", { class: "small", role: "status" });
  const line = new CommandLine();
  const input = (name, label, attributes) => { const made = h("input", { class: "field", name, ...attributes }); return [h("label", {}, label, made), made]; };
  const [nameLabel, name] = input("name", "Name", { required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._@\\-]*", placeholder: "loss-spikes" });
  const kind = h("select", { class: "pick", name: "kind", onchange: () => arrange() }, KINDS.map(([value, text]) => h("option", { value }, text)));
  const finding = h("select", { class: "pick", name: "finding" });
  const findingLabel = h("label", {}, "Which", finding);
  const [thresholdLabel, threshold] = input("threshold", "Percent", { type: "number", min: 0, step: "any", required: true });
  const [minutesLabel, minutes] = input("minutes", "Looking back, minutes", { type: "number", min: 1, value: 60, required: true });
  const [jobLabel, job] = input("job", "Only job", { type: "number", min: 0, placeholder: "all you see" });
  const [targetsLabel, targets] = input("targets", "Tell", { placeholder: "a web hook, slack: and its web hook, mail:ann@example.org" });
  targetsLabel.className = "wide";
  const save = h("button", { class: "button primary" }, "Set the alert");
  const form = h("form", { class: "alertform", oninput: () => tell(), onsubmit: (event) => { event.preventDefault(); send(); } },
    h("div", { class: "asked" }, nameLabel, h("label", {}, "Tell when", kind), findingLabel, thresholdLabel, minutesLabel, jobLabel, targetsLabel), h("div", { class: "bar" }, save), said, line.node);
  const formCard = card("A new rule", "the name of a rule that exists changes that rule", form, "half");
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Alerts"), h("p", {}, "A rule notifies once when it becomes true, and again only after it has been false in between.")),
    h("div", { class: "grid" }, rulesCard, formCard, firedCard));

  const body = () => ({
    kind: kind.value, finding: kind.value === "finding" ? finding.value : "", threshold: kind.value === "finding" ? 0 : Number(threshold.value) / (share(kind.value) ? 100 : 1),
    minutes: Number(minutes.value) || 60, job: Number(job.value) || 0, targets: targets.value.split(",").map((each) => each.trim()).filter(Boolean),
  });

  function tell() {
    const asked = body(), given = (option, value) => (value ? [option, value] : []);
    line.set(shellWords("phalanx", "alerts", "set", name.value || "NAME", asked.kind.replace("_", "-"), ...given("--finding", asked.finding), ...given("--threshold", asked.threshold), ...given("--minutes", asked.minutes === 60 || !LOOKS_BACK.has(asked.kind) ? 0 : asked.minutes), ...given("--job", asked.job), ...asked.targets.flatMap((each) => ["--tell", each])));
  }

  function arrange() {
    const [, , usual] = KINDS.find(([value]) => value === kind.value), asks = kind.value !== "finding";
    findingLabel.hidden = asks;
    thresholdLabel.hidden = !asks;
    minutesLabel.hidden = !LOOKS_BACK.has(kind.value);
    threshold.required = asks;
    thresholdLabel.firstChild.textContent = share(kind.value) ? "Percent" : "Times";
    threshold.value = asks ? (share(kind.value) ? usual * 100 : usual) : "";
    tell();
  }

  const say = (text, tone) => { said.className = `small ${tone}`; setText(said, text); };

  async function tried(work) {
    try {
      return await work();
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      say(problem.message, "bad");
      return null;
    }
  }

  async function send() {
    const made = await tried(async () => (await call(path(name.value), { method: "PUT", body: JSON.stringify(body()) })).json());
    if (!made) return;
    say(`Set: ${made.words}.`, "good");
    await refresh();
  }

  async function test(each) {
    say("sending …", "muted");
    const found = await tried(() => post(path(each.name, "test")));
    if (!found) return;
    const lost = found.tried.filter(({ problem }) => problem);
    say(found.tried.length ? found.tried.map(({ target, problem }) => `${target}: ${problem || "it arrived"}`).join("; ") : "It tells nobody: this page lists it.", lost.length ? "bad" : "good");
    line.set(shellWords("phalanx", "alerts", "test", each.name));
  }

  async function silence(each, length) {
    if (await tried(() => post(path(each.name, "silence"), { minutes: length }))) line.set(shellWords("phalanx", "alerts", "silence", each.name, length));
    await refresh();
  }

  const removal = (each) => ({
    verb: "Remove", tone: "danger", title: `Remove alert ${each.name}`, text: `Nobody is told any more ${each.words}.`, reason: false, done: refresh,
    command: () => shellWords("phalanx", "alerts", "rm", each.name), send: () => call(path(each.name), { method: "DELETE" }).then(() => null),
  });

  function row([each, refused, now]) {
    const quiet = each.silent_until > now;
    return h("tr", {}, h("td", { class: "strong" }, each.name, h("div", { class: "faint small" }, each.by)), h("td", {}, each.words),
      h("td", {}, each.targets.join(", ") || "this page"),
      h("td", {}, each.since.length ? h("span", { class: "tag bad" }, `true for ${counted(each.since.length, "thing")}`) : h("span", { class: "tag good" }, "untrue"), quiet ? h("div", { class: "faint small" }, `silent until ${moment(each.silent_until * 1e9)}`) : ""),
      h("td", {}, h("div", { class: "acts" }, h("button", { class: "button", type: "button", disabled: Boolean(refused), title: refused, onclick: () => test(each) }, "Test"),
        h("button", { class: "button", type: "button", disabled: Boolean(refused), title: refused, onclick: () => silence(each, quiet ? 0 : SILENCE_MINUTES) }, quiet ? "Speak again" : "Silence for 1 h"), actionButton(removal(each), refused))));
  }

  async function refresh() {
    const [found, me] = await Promise.all([get("/v1/alerts"), who()]);
    const refused = refusedTo(me.token.role, "admin", "user"), now = Date.now() / 1e3;
    if (!finding.options.length) { finding.append(...found.findings.map((each) => h("option", { value: each, selected: each === "loss_spike" }, words(each)))); arrange(); }
    formCard.hidden = Boolean(refused);
    none.hidden = found.alerts.length > 0;
    rules.hidden = !found.alerts.length;
    fill(rules.body, found.alerts.map((each) => [each, refused, Math.floor(now / 60) * 60]), ([each]) => each.name, row);
    nothing.hidden = found.fired.length > 0;
    fill(fired, found.fired.toReversed().slice(0, 50), (each) => each.rule + each.subject + each.time, (each) => h("li", {}, h("time", {}, moment(each.time * 1e9)), h("span", { class: "strong" }, `${each.rule}: `),
      each.job ? h("a", { href: `#/job/${each.job}` }, each.text) : each.node ? h("a", { href: `#/node/${encodeURIComponent(each.node)}` }, each.text) : each.text, each.silenced ? h("span", { class: "tag" }, "silenced") : ""));
  }
  return { node, refresh };
}
