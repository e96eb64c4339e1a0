// What a person may do: asked about once, with a reason; then a few seconds in which it can be taken back.
import { Refused } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { h, setText } from "./dom.js";

const UNDO_MS = 6000;
const TOLD_MS = 8000;
const TICK_MS = 200;
const waiting = new Set(); // orders that have not been sent yet

const toasts = h("div", { class: "toasts", role: "region", "aria-label": "What was ordered", "aria-live": "polite" });
addEventListener("beforeunload", (event) => { if (waiting.size) event.preventDefault(); });

// An order: title, text (what will happen), command (function of the reason and fields), send (the same), fields: [{name, label, value, min}]
export function askFor(order) {
  const reason = h("input", { class: "field", name: "why", maxlength: 300, autocomplete: "off", placeholder: "What others read about it" });
  const fields = (order.fields ?? []).map(({ name, label, ...rest }) => ({ name, label, input: h("input", { class: "field", name, required: true, type: "number", ...rest }) }));
  const line = new CommandLine();
  const values = () => Object.fromEntries(fields.map(({ name, input }) => [name, Number(input.value)]));
  const tell = () => line.set(order.command(reason.value.trim(), values()));
  const form = h("form", { method: "dialog", oninput: tell, onsubmit: () => { box.close(); begin(order, reason.value.trim(), values()); } },
    h("h2", {}, order.title), h("p", {}, order.text), fields.map(({ label, input }) => h("label", {}, label, input)),
    order.reason === false ? "" : h("label", {}, "Reason", reason), line.node,
    h("div", { class: "bar" }, h("button", { class: `button primary ${order.tone ?? ""}`, type: "submit" }, order.verb), h("button", { class: "button", type: "button", onclick: () => box.close() }, "Back")));
  const box = h("dialog", { class: "ask", "aria-label": order.title, onclose: () => box.remove() }, form);
  tell();
  document.body.append(box);
  box.showModal();
  (fields[0]?.input ?? reason).focus();
}

// Nothing has been sent while the bar runs: taking it back needs nobody's help.
function begin(order, why, values) {
  const until = performance.now() + UNDO_MS;
  const said = h("span", {});
  const bar = h("progress", { max: UNDO_MS, value: UNDO_MS, "aria-hidden": "true" });
  const undo = h("button", { class: "button", type: "button", onclick: () => end("Taken back: nothing was sent.") }, "Undo");
  const now = h("button", { class: "quiet", type: "button", onclick: () => send() }, "Now");
  const toast = h("div", { class: "toast" }, said, undo, now, bar);
  const entry = {};
  waiting.add(entry);
  toasts.append(toast);
  if (!toasts.isConnected) document.body.append(toasts);
  const tick = () => {
    const left = until - performance.now();
    bar.value = Math.max(0, left);
    setText(said, `${order.title} in ${Math.max(1, Math.ceil(left / 1000))} s`);
    if (left <= 0) send();
  };
  const timer = setInterval(tick, TICK_MS);
  tick();

  function end(text, tone = "") {
    clearInterval(timer);
    waiting.delete(entry);
    toast.className = `toast ${tone}`;
    toast.replaceChildren(h("span", {}, text), h("button", { class: "quiet", type: "button", "aria-label": "Close", onclick: () => toast.remove() }, "✕"));
    setTimeout(() => toast.remove(), tone === "bad" ? 3 * TOLD_MS : TOLD_MS);
  }

  async function send() {
    clearInterval(timer);
    for (const each of [undo, now, bar]) each.remove();
    setText(said, `${order.title} …`);
    try {
      const done = await order.send(why, values);
      end(done?.message ? `${order.title}: ${done.message}` : `${order.title}: done.`, "good");
      order.done?.();
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      end(`${order.title}: ${problem.message}`, "bad");
    }
  }
}

// Why somebody may not do something; "": they may. The server refuses it all the same.
export const refusedTo = (role, ...allowed) => (allowed.includes(role) ? "" : allowed.length > 1 ? "Your token may look, not act: it has the role of a reader." : "This is for administrators.");

// A button that asks; who may not do it sees why instead of finding out.
export function actionButton(order, refused) {
  return h("button", { class: `button ${order.tone ?? ""}`, type: "button", disabled: Boolean(refused), title: refused, onclick: () => askFor(order) }, order.label ?? order.verb);
}

const told = (...words) => (why) => shellWords("phalanx", ...words, ...(why ? ["--why", why] : []));

// Orders about a job, those that its state allows.
export function jobOrders(job, post, done) {
  const { id } = job, path = `/v1/jobs/${id}`, named = `job ${id}`;
  const order = (verb, title, text, words = [verb, id], more = {}) => ({
    label: more.label, verb: more.verb ?? title.split(" ")[0], title, text, command: told(...words), tone: more.tone, done,
    send: (why) => post(`${path}/${verb}`, { why }),
  });
  const cancel = order("cancel", `Cancel ${named}`, "It ends for good: a program gets SIGTERM and a grace. What was saved stays.", ["cancel", id], { tone: "danger", verb: "Cancel it", label: "Cancel" });
  if (job.ended_ns) return [];
  const release = order("release", `Release ${named}`, "It goes into the queue and starts when there is room.", ["release", id], { label: "Resume" });
  if (job.state === "pending" || job.state === "draining") {
    return [job.held ? release : order("hold", `Hold ${named}`, "It is kept out of the queue until somebody releases it."), cancel];
  }
  const scale = {
    label: "Scale", verb: "Scale it", title: `Scale ${named}`, text: "An elastic job changes while it runs; any other saves its state at a step boundary and goes on with them all.",
    fields: [{ name: "replicas", label: "Replicas", value: job.replicas, min: 1, max: 1_000_000 }], done,
    command: (why, { replicas }) => shellWords("phalanx", "scale", id, replicas, ...(why ? ["--why", why] : [])),
    send: (why, { replicas }) => post(`${path}/scale`, { replicas, why }),
  };
  return [order("drain", `Drain ${named}`, "It makes a checkpoint, gives its nodes back and is held until somebody resumes it.", ["drain", id]),
    order("requeue", `Requeue ${named}`, "It makes a checkpoint, gives its nodes back and waits for its next turn."), scale, cancel];
}

// An answer to what only a person may decide.
export const answerOrder = (question, nodes, approve, post, done) => ({
  label: approve ? "Take them out" : "Keep them", verb: approve ? "Take them out" : "Keep them", title: `${approve ? "Take out" : "Keep"} ${nodes.length === 1 ? nodes[0] : `${nodes.length} nodes`}`, done,
  text: approve ? "They get no work, and what runs on them leaves." : "They go on working as if nothing had been asked.",
  command: told("answer", question, approve ? "--take-out" : "--keep"), send: (why) => post(`/v1/questions/${question}`, { approve, why }),
});

// Orders about a node.
export function nodeOrders(node, post, done) {
  const path = `/v1/nodes/${encodeURIComponent(node.name)}`, { name } = node;
  const drain = {
    verb: "Drain", title: `Drain ${name}`, text: "Its jobs leave it with their state, and it gets no new work until somebody resumes it.", done,
    command: told("drain", name), send: (why) => post(`${path}/drain`, { why }),
  };
  const resume = {
    verb: "Resume", title: `Resume ${name}`, text: "It is tested, and takes work again.", done,
    command: told("resume", name), send: (why) => post(`${path}/readmit`, { tested: false, why }),
  };
  return ["draining", "quarantined"].includes(node.state) ? [resume] : node.state === "dead" ? [] : [drain];
}
