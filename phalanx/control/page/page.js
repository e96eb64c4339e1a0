// Reads the API and shows it as text. Names and messages come from users: they are only ever
// put into text nodes, never into markup.
const element = (id) => document.getElementById(id);
let token = sessionStorage.getItem("phalanx-token") ?? "";
let refreshing = false;
let wanted = false;

async function get(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` } });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error.message), { status: answer.status });
  return body;
}

function fill(id, rows) {
  element(id).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const [text, kind] of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (kind) cell.className = kind;
      row.append(cell);
    }
    return row;
  }));
}

const tone = (state) =>
  ["failed", "dead", "quarantined"].includes(state) ? "bad"
    : ["running", "healthy", "done"].includes(state) ? "good" : "";
const clock = (ns) => new Date(ns / 1e6).toLocaleTimeString();

async function refresh() {
  if (refreshing) { wanted = true; return; }
  refreshing = true;
  try {
    const [status, jobs, nodes, events] = await Promise.all([
      get("/v1/status"), get("/v1/jobs?state=all&limit=200"),
      get("/v1/nodes?limit=200"), get("/v1/events?limit=50"),
    ]);
    const states = Object.entries(status.nodes).filter(([, count]) => count);
    element("fleet").textContent =
      `${states.map(([state, count]) => `${count} ${state}`).join(", ") || "no nodes yet"}; ` +
      `${status.free_gpus} of ${status.gpus} GPUs free; epoch ${status.epoch}, event ${status.sequence}`;
    element("notices").replaceChildren(...status.notices.slice(-5).reverse().map((notice) => {
      const line = document.createElement("li");
      line.textContent = `${clock(notice.time_ns)} ${notice.job ? `job ${notice.job}: ` : ""}${notice.text}`;
      if (notice.level === "error") line.className = "bad";
      return line;
    }));
    fill("jobs", jobs.jobs.reverse().map((job) => [
      [job.id], [job.name], [job.team], [job.state, tone(job.state)], [job.gpus],
      [job.steps ? `${job.step} / ${job.steps}` : job.step], [job.why.text]]));
    fill("nodes", nodes.nodes.map((node) => [
      [node.name], [node.state, tone(node.state)], [`${node.free_gpus} / ${node.gpus}`],
      [node.jobs.join(", ")], [node.why.text]]));
    fill("events", events.events.reverse().map((event) => [
      [event.sequence], [clock(event.time_ns)], [event.kind],
      [event.commands.map((command) => `${command.kind}: ${command.why.text}`).join("; ")]]));
    element("state").textContent = status.problem || `phalanx ${status.version}, live`;
    element("view").hidden = false;
    element("login").hidden = true;
  } catch (problem) {
    element("state").textContent = problem.message;
    if (problem.status === 401 || problem.status === 403) {
      element("view").hidden = true;
      element("login").hidden = false;
    }
  } finally {
    refreshing = false;
    if (wanted) { wanted = false; setTimeout(refresh, 500); }
  }
}

function listen() {
  const socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}/v1/live`);
  socket.onopen = () => socket.send(token);
  socket.onmessage = (message) => { if (JSON.parse(message.data).kind !== "quiet") refresh(); };
  socket.onclose = () => { refresh(); setTimeout(listen, 2000); };
}

element("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value.trim();
  sessionStorage.setItem("phalanx-token", token);
  refresh();
});
if (!token) element("login").hidden = false;
else refresh();
listen();
