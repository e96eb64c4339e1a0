// Runs of pipelines: the list, and one run as a graph with times, costs, what was cached and what a person is asked.
import { actionButton, refusedTo } from "../lib/actions.js";
import { get, post, who } from "../lib/api.js";
import { shellWords } from "../lib/command.js";
import { card, empty, figure, fill, h, rowLink, setText, table } from "../lib/dom.js";
import { counted, dollars, moment, short, span } from "../lib/format.js";
import { state } from "../lib/state.js";

const SPACE = "http://www.w3.org/2000/svg";
const BOX = { width: 200, height: 50, gap: 48, row: 66 };
const LONGEST = 26; // letters of a name in a box
const LIVE = ["running", "asking"];

const took = (run, nowNs) => span(((run.ended_ns || nowNs) - run.began_ns) / 1e9);
const cost = (each) => (each.gpu_hours ? `${short(each.gpu_hours)} GPU-h${each.dollars ? `, ${dollars(each.dollars)}` : ""}` : "");
const counts = (states) => Object.entries(states).map(([name, count]) => `${count} ${name}`).join(", ");

export function pipelinesView() {
  const list = table(["run", "state", "tasks", "began", ["took", "num"], ["cost", "num"], "team"]);
  const none = empty("No pipeline has run here", h("p", {}, "Begin one: ", h("code", {}, "phalanx pipeline run pipeline.toml --server URL")));
  const listCard = card("Runs", "", h("div", {}, none, list), "flush");
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Pipelines")), h("div", { class: "grid" }, listCard));

  async function refresh() {
    const { pipelines } = await get("/v1/pipelines");
    none.hidden = pipelines.length > 0;
    list.hidden = !pipelines.length;
    listCard.note(counted(pipelines.length, "run"));
    const now = Date.now() * 1e6;
    fill(list.body, pipelines, (run) => run.id, (run) => rowLink(`#/pipeline/${run.id}`,
      h("td", {}, h("a", { href: `#/pipeline/${run.id}` }, `${run.id} ${run.name}`), h("div", { class: "faint small" }, run.folder)),
      h("td", {}, state(run.state)), h("td", {}, counts(run.states)), h("td", {}, moment(run.began_ns)),
      h("td", { class: "num" }, took(run, now)), h("td", { class: "num" }, cost(run) || "–"), h("td", {}, run.team)));
  }
  return { node, refresh };
}

export function pipelineView({ rest }) {
  const number = Number(rest[0]);
  const title = h("h1", {}, `Pipeline run ${number}`);
  const facts = h("p");
  const acts = h("div", { class: "acts" });
  const figures = { state: figure("State"), done: figure("Done"), cached: figure("Cached"), took: figure("Took"), cost: figure("Cost") };
  const asks = h("div", { class: "asks" });
  const asksCard = card("A person is asked", "the run waits for an answer", asks);
  const picture = h("div", { class: "graph" });
  const graphCard = card("Graph", "what waits for what", picture);
  const rows = table(["task", "state", ["tries", "num"], ["time", "num"], ["cost", "num"], "scores", "why", "job"]);
  const rowsCard = card("Tasks", "", rows, "flush");
  const node = h("div", {}, h("div", { class: "title" }, h("a", { href: "#/pipelines" }, "Pipelines"), h("span", { class: "faint" }, "/"), title, acts, facts),
    h("div", { class: "grid" }, card("Now", "", h("dl", { class: "figures" }, Object.values(figures))), asksCard, graphCard, rowsCard));

  // The file of a pipeline is on the machine it was begun from.
  const order = (title, text, command, what, body, more) => ({
    title, text, done: refresh, command: (why) => shellWords("phalanx", ...command, ...(why ? ["--why", why] : []), "--server", location.origin), send: (why) => post(`/v1/pipelines/${number}/${what}`, { ...body, why }), ...more,
  });
  const cancel = order(`Cancel pipeline run ${number}`, "Its jobs end, and no further step begins. What is done stays done.", ["pipeline", "cancel", "PIPELINE.toml"], "cancel", undefined,
    { verb: "Cancel it", label: "Cancel the run", tone: "danger" });
  const answer = (task, approve) => order(`${approve ? "Approve" : "Reject"} ${task}`, approve ? "The steps that wait for it go on." : "The steps that wait for it do not run.",
    ["answer", task, "--pipeline", "PIPELINE.toml", approve ? "--approve" : "--reject"], "answer", { task, approve }, { verb: approve ? "Approve" : "Reject", tone: approve ? "" : "danger" });

  async function refresh() {
    const { run, tasks } = await get(`/v1/pipelines/${number}?after=1000000000`); // its events are not shown here
    setText(title, `${run.name}, run ${run.id}`);
    setText(facts, `${run.user || "somebody"} · team ${run.team} · ${run.folder}`);
    const refused = refusedTo((await who()).token.role, "admin", "user"), key = `${LIVE.includes(run.state)} ${refused}`;
    if (acts.key !== key) acts.replaceChildren(...(LIVE.includes(run.state) ? [actionButton(cancel, refused)] : []));
    acts.key = key;
    const done = tasks.filter((task) => task.state === "done").length;
    figures.state.set(run.state);
    figures.done.set(done, "", `of ${counted(tasks.length, "task")}`);
    figures.cached.set(run.states.cached ?? 0, "", "not run again");
    figures.took.set(took(run, Date.now() * 1e6));
    figures.cost.set(cost(run) || "–");
    showQuestions(tasks.filter((task) => task.question), refused);
    drawGraph(picture, tasks);
    fill(rows.body, tasks.map(shownTask), (task) => task.name, (task) => h("tr", {}, h("td", {}, task.name, h("div", { class: "faint small" }, task.kind)),
      h("td", {}, state(task.state)), h("td", { class: "num" }, task.attempts || ""), h("td", { class: "num" }, task.time),
      h("td", { class: "num" }, task.cost), h("td", {}, task.scores), h("td", {}, task.reason),
      h("td", {}, task.job ? h("a", { href: `#/job/${task.job}` }, String(task.job)) : "")));
    rowsCard.note(counts(run.states));
  }

  function showQuestions(questions, refused) {
    asksCard.hidden = !questions.length;
    fill(asks, questions.map(({ name, question }) => ({ name, question, refused })), (task) => task.name, (task) => h("div", { class: "bar" },
      h("strong", {}, task.name), h("span", {}, task.question), actionButton(answer(task.name, true), task.refused), actionButton(answer(task.name, false), task.refused)));
  }
  return { node, refresh };
}

function shownTask(task) {
  const scores = Object.entries(task.result.scores ?? {}).map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const time = task.attempts ? span(task.seconds) : "";
  return { name: task.name, kind: task.kind, state: task.state, reason: task.reason, job: task.job, attempts: task.attempts, scores, time, cost: cost(task) };
}

// A column behind the last task that each waits for; the server lists them in an order in which they can run.
export function placed(tasks) {
  const columns = new Map();
  const used = new Map();
  return tasks.map((task) => {
    const column = Math.max(-1, ...task.waits_for.map((name) => columns.get(name) ?? -1)) + 1;
    const row = used.get(column) ?? 0;
    columns.set(task.name, column);
    used.set(column, row + 1);
    return { task, x: column * (BOX.width + BOX.gap), y: row * BOX.row };
  });
}

const part = (tag, attributes, ...children) => {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

function drawGraph(parent, tasks) {
  const text = JSON.stringify(tasks.map(({ name, state: at, seconds, attempts }) => [name, at, attempts ? Math.round(seconds) : 0]));
  if (parent.drawn === text) return;
  parent.drawn = text;
  const boxes = placed(tasks);
  const at = new Map(boxes.map((box) => [box.task.name, box]));
  const width = Math.max(...boxes.map((box) => box.x)) + BOX.width + 2;
  const height = Math.max(...boxes.map((box) => box.y)) + BOX.height + 2;
  const edges = boxes.flatMap((box) => box.task.waits_for.map((name) => edge(at.get(name), box)));
  const made = part("svg", { viewBox: `-1 -1 ${width} ${height}`, width, height, role: "img", "aria-label": "Which task waits for which" },
    ...edges, ...boxes.map(box));
  parent.replaceChildren(made);
}

function edge(from, to) {
  const [x1, y1, x2, y2] = [from.x + BOX.width, from.y + BOX.height / 2, to.x, to.y + BOX.height / 2];
  const middle = (x1 + x2) / 2;
  return part("path", { class: "edge", d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` });
}

function box({ task, x, y }) {
  const name = task.name.length > LONGEST ? `${task.name.slice(0, LONGEST - 1)}…` : task.name;
  const facts = [task.state, task.attempts ? span(task.seconds) : "", task.gpu_hours ? `${short(task.gpu_hours)} GPU-h` : ""].filter(Boolean).join(" · ");
  const group = part("g", { class: `task ${task.state}`, transform: `translate(${x},${y})` },
    part("title", {}, `${task.name}: ${task.reason || task.state}`),
    part("rect", { width: BOX.width, height: BOX.height, rx: 6 }),
    part("text", { class: "name", x: 10, y: 20 }, name), part("text", { class: "facts", x: 10, y: 38 }, facts));
  return task.job ? part("a", { href: `#/job/${task.job}` }, group) : group;
}
