// The shell: who you are, where you are, whether the server is there, and the view in the middle.
import { Live, askOtherTabs, get, hasToken, keepToken, post } from "./lib/api.js";
import { h, setText, svg } from "./lib/dom.js";
import { counted, whole, words } from "./lib/format.js";
import { ICONS, SHIELDS } from "./lib/icons.js";
import { nextTheme, themeName, toggleTheme } from "./lib/theme.js";
import { compareView } from "./views/compare.js";
import { eventsView } from "./views/events.js";
import { fleetView } from "./views/fleet.js";
import { goodputView } from "./views/goodput.js";
import { jobView } from "./views/job.js";
import { jobsView } from "./views/jobs.js";
import { loginView } from "./views/login.js";
import { nodeView } from "./views/node.js";
import { planView } from "./views/plan.js";
import { queueView } from "./views/queue.js";
import { simulateView } from "./views/simulate.js";

const VIEWS = {
  fleet: ["Fleet", fleetView], jobs: ["Jobs", jobsView], goodput: ["Goodput", goodputView], events: ["Events", eventsView],
  queue: ["Queue", queueView], compare: ["Compare", compareView], plan: ["Plan", planView], simulate: ["Simulate", simulateView],
};
const INNER = { job: ["Job", jobView, "jobs"], node: ["Node", nodeView, "fleet"] };
const LEAST_MS = 700; // between two refreshes of a view
const BACKSTOP_MS = 10_000;

const live = new Live();
const ownVersion = document.querySelector('meta[name="page-base"]').content.split("/").pop();
const main = document.getElementById("main");
const app = document.getElementById("app");
let view = null;
let shown = "";
let refreshing = false;
let wanted = false;
let last = 0;
let timer = 0;

// The frame.
const links = Object.entries(VIEWS).map(([name, [title]]) =>
  h("li", {}, h("a", { href: `#/${name}`, "data-view": name }, svg("0 0 24 24", ...ICONS[name]), h("span", {}, title))));
const changeTheme = () => { toggleTheme(); tellTheme(); view?.repaint?.(); };
const themeButton = h("button", { type: "button", onclick: changeTheme });
const themeIcon = h("button", { type: "button", class: "icon", onclick: changeTheme }, "◐");
const leave = h("button", { type: "button", onclick: () => { keepToken(""); live.close(); location.reload(); } }, "Sign out");
const about = h("span", {}, "");
const rail = h("aside", { class: "rail" },
  h("a", { class: "brand", href: "#/fleet" }, svg("0 0 46 26", ...SHIELDS), "Phalanx"),
  h("nav", { "aria-label": "Views" }, h("ul", {}, links)),
  h("div", { class: "foot" }, themeButton, leave, about));
const liveNode = h("span", { class: "live", role: "status" }, "connecting");
const facts = h("span", { class: "facts" });
const top = h("div", { class: "top" }, facts, h("span", { class: "spring" }), liveNode, themeIcon);
const notices = h("div", { "aria-live": "polite" });
const content = h("div", { class: "content" });

function tellTheme() {
  setText(themeButton, `Theme: ${themeName()}`);
  for (const each of [themeButton, themeIcon]) each.setAttribute("aria-label", `Theme: ${themeName()}. Change to ${nextTheme()}.`);
}

function notice(key, text, tone = "", ...actions) {
  notices.querySelector(`[data-key="${key}"]`)?.remove();
  if (text) notices.append(h("div", { class: `notice ${tone}`, "data-key": key }, h("span", {}, text), ...actions));
}

// Where you are: #/job/7?at=…
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name || "fleet", rest, query: new URLSearchParams(query) };
}

function go(path, query = {}, replace = false) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined)).toString();
  const hash = `#/${path}${text ? `?${text}` : ""}`;
  if (replace) history.replaceState(null, "", hash);
  else location.hash = hash;
}

async function enter() {
  const at = place();
  if (at.name === "login") return signIn(at.rest);
  if (!hasToken()) await askOtherTabs();
  if (!hasToken()) return askToken("");
  const [title, make, parent = at.name] = VIEWS[at.name] ?? INNER[at.name] ?? [];
  if (!make) return go("fleet", {}, true), enter();
  const key = `${at.name}/${at.rest.join("/")}`;
  if (shown === key && view) {
    view.moved?.(at.query);
    return refresh();
  }
  frame();
  view?.close?.();
  shown = key;
  for (const link of links) {
    const anchor = link.firstElementChild;
    if (anchor.dataset.view === parent) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  document.title = `${title}${at.rest.length ? ` ${at.rest.join(" ")}` : ""} · Phalanx`;
  view = make({ rest: at.rest, query: at.query, go, live });
  content.replaceChildren(view.node);
  scrollTo(0, 0);
  return refresh();
}

function frame() {
  if (rail.isConnected) return;
  main.replaceChildren(notices, content);
  app.prepend(rail, top);
  if (live.state !== "live") live.open();
}

// Views are refreshed when something happened, not more often than a person can see.
function refreshSoon() {
  if (timer) return;
  timer = setTimeout(() => { timer = 0; refresh(); }, Math.max(0, last + LEAST_MS - Date.now()));
}

async function refresh() {
  if (refreshing) { wanted = true; return; }
  if (document.hidden && view) { wanted = true; return; }
  refreshing = true;
  last = Date.now();
  const current = view;
  try {
    await Promise.all([current?.refresh(), glance()]);
    notice("problem", "");
    document.documentElement.dataset.ready = shown;
  } catch (problem) {
    if (problem.status === undefined) throw problem;
    if (problem.status === 404 && current === view) notice("problem", problem.message, "bad");
    else if (problem.status !== 401 && problem.status !== 0) notice("problem", problem.message, "bad");
  } finally {
    refreshing = false;
    if (wanted) { wanted = false; refreshSoon(); }
  }
}

async function glance() {
  const status = await get("/v1/status");
  const nodes = Object.values(status.nodes).reduce((a, b) => a + b, 0);
  const lost = status.nodes.dead + status.nodes.quarantined;
  const running = (status.jobs.running ?? 0) + (status.jobs.forming ?? 0);
  facts.replaceChildren(
    h("b", {}, counted(nodes, "node")), lost ? h("span", { class: "bad" }, ` ${whole(lost)} lost`) : "",
    " · ", h("b", {}, `${whole(status.free_gpus)} of ${whole(status.gpus)}`), " GPUs free · ",
    h("b", {}, counted(running, "job")), ` running, ${whole(status.jobs.pending ?? 0)} waiting`);
  setText(about, `phalanx ${status.version}, epoch ${status.epoch}`);
  notice("store", status.problem ? `Nothing can be stored at the moment: ${status.problem}` : "", "bad");
  const asked = status.questions.filter((each) => each.nodes.length); // of the others the nodes are still being counted
  for (const each of asked) ask(each);
  for (const old of notices.querySelectorAll('[data-key^="question"]')) if (!asked.some((each) => `question-${each.question}` === old.dataset.key)) old.remove();
}

// Something that a person must decide: more nodes failed at once than the core may take out by itself.
function ask({ question, about, nodes, causes }) {
  const key = `question-${question}`, text = `${about} ${nodes.join()}`;
  const shown = notices.querySelector(`[data-key="${key}"]`);
  if (shown?.asked === text) return;
  const answer = (approve) => post(`/v1/questions/${question}`, { approve }).then(() => notice(key, ""), (problem) => notice("problem", problem.message, "bad"));
  const button = (label, approve) => h("button", { class: "button", type: "button", onclick: () => answer(approve) }, label);
  const which = `${nodes.slice(0, 4).join(", ")}${nodes.length > 4 ? ` and ${whole(nodes.length - 4)} more` : ""} (${[...new Set(causes)].map(words).join(", ")})`;
  notice(key, `Somebody must decide: so many nodes failed at once that none more is taken out without a person's word: ${which}.`, "",
    button("Take them out", true), button("Keep them", false), h("a", { href: "#/events" }, "See why"));
  notices.querySelector(`[data-key="${key}"]`).asked = text;
}

// Signing in. A link carries a code that is good once; it leaves the address at once.
async function signIn([code = "", ...rest]) {
  history.replaceState(null, "", `#/${rest.join("/") || "fleet"}`);
  if (code) {
    try {
      keepToken((await post("/v1/login", undefined, code)).secret);
    } catch (problem) {
      if (!hasToken()) return askToken(problem.code === "wrong_token" || problem.code === "link_used"
        ? "This link was used already. Make another with `phalanx page`." : problem.message);
    }
  }
  return enter();
}

function askToken(why) {
  view?.close?.();
  view = null;
  shown = "";
  live.close();
  rail.remove();
  top.remove();
  main.replaceChildren(loginView(why, async (secret) => {
    keepToken(secret);
    await get("/v1/whoami");
    await enter();
  }));
  document.documentElement.dataset.ready = "login";
}

live.addEventListener("state", ({ detail }) => {
  liveNode.classList.toggle("away", detail === "away");
  setText(liveNode, detail === "live" ? "live" : "the server is away, trying again");
  if (detail === "live") refreshSoon();
});
live.addEventListener("message", ({ detail }) => {
  if (detail.kind === "ready" && detail.page !== ownVersion) {
    notice("stale", "The server was renewed: this page is of an older version.", "",
      h("button", { class: "button primary", type: "button", onclick: () => location.reload() }, "Reload"));
  }
  if (detail.kind === "quiet") return;
  view?.message?.(detail);
  refreshSoon();
});
addEventListener("phalanx:login", ({ detail }) => askToken(hasToken() ? detail : ""));
addEventListener("hashchange", enter);
document.addEventListener("visibilitychange", () => { if (!document.hidden && wanted) { wanted = false; refresh(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.repaint?.());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select")) return;
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (name && rail.isConnected) go(name);
});
setInterval(() => { if (rail.isConnected) refreshSoon(); }, BACKSTOP_MS);
tellTheme();
enter();
