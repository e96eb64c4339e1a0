// The shell: who you are, where you are, whether the server is there, and the view in the middle.
import { Live, askOtherTabs, get, hasToken, keepToken, post, status, who } from "./lib/api.js";
import { empty, h, setText, svg } from "./lib/dom.js";
import { counted, whole, words } from "./lib/format.js";
import { ICONS, SHIELDS } from "./lib/icons.js";
import { nextTheme, themeName, toggleTheme } from "./lib/theme.js";

// Views by name; ``jobs`` is made by jobsView of views/jobs.js, which is loaded when one goes there.
const VIEWS = {
  fleet: "Fleet", jobs: "Jobs", goodput: "Goodput", events: "Events", queue: "Queue", sweeps: "Sweeps", runs: "Runs", plan: "Plan", pipelines: "Pipelines", simulate: "Simulate", alerts: "Alerts",
};
const INNER = { job: ["Job", "jobs"], node: ["Node", "fleet"], pipeline: ["Pipeline", "pipelines"], submit: ["Submit", "jobs"], incident: ["Incident", "jobs"] };
const FILES = { pipeline: "pipelines" }; // of views that share one
const LATER = ["lib/palette.js", "lib/share.js", "lib/actions.js"]; // what the shell itself may need
const RETRY_MS = 3000; // after an answer that was none
const LEAST_MS = 700; // between two refreshes of a view
const BACKSTOP_MS = 10_000;
const IDLE_MS = 1500; // after the first view, until the others are fetched

const live = new Live();
const ownVersion = document.querySelector('meta[name="page-base"]').content.split("/").pop();
const main = document.getElementById("main");
const app = document.getElementById("app");
let view = null;
let shown = "";
let parent = ""; // the view of the rail that it belongs to
let refreshing = null; // a view, until it has its answers
let wanted = false;
let last = 0;
let timer = 0;
let entered = 0; // times that a view was asked for
let fetched = false; // all views

// The frame.
const links = Object.entries(VIEWS).map(([name, title]) =>
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
const notices = h("div", { "aria-live": "polite" });
const content = h("div", { class: "content" });
let palette = null;
const goTo = h("button", { type: "button", class: "goto", title: "Ctrl-K or ⌘K", onclick: () => openPalette() }, "Go to", h("kbd", { "aria-hidden": "true" }, "⌘K"));
const share = h("button", { type: "button", class: "goto", title: "Save what is seen as one HTML file", onclick: async () => (await part("lib/share.js"))?.save(content, share) }, "Share");
const top = h("div", { class: "top" }, facts, h("span", { class: "spring" }), goTo, share, liveNode, themeIcon);

function tellTheme() {
  setText(themeButton, `Theme: ${themeName()}`);
  for (const each of [themeButton, themeIcon]) each.setAttribute("aria-label", `Theme: ${themeName()}. Change to ${nextTheme()}.`);
}

function notice(key, text, tone = "", ...actions) {
  notices.querySelector(`[data-key="${key}"]`)?.remove();
  if (text) notices.append(h("div", { class: `notice ${tone}`, "data-key": key }, h("span", {}, text), ...actions));
}

// An address may be typed, or cut off: what no encoding made is taken as it is.
const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } };

// Where you are: #/job/7?at=…
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...rest] = path.split("/").map(decoded);
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
  if (at.name === "login") return signIn(at.rest, at.query);
  if (!hasToken()) await askOtherTabs();
  if (!hasToken()) return askToken("");
  const [title, over] = VIEWS[at.name] ? [VIEWS[at.name], at.name] : INNER[at.name] ?? [];
  if (!title) return go("fleet", {}, true), enter();
  const key = `${at.name}/${at.rest.join("/")}`;
  if (shown === key && view?.moved) {
    view.moved(at.query);
    return refresh();
  }
  frame();
  view?.close?.();
  view = null;
  [shown, parent] = [key, over];
  for (const link of links) {
    const anchor = link.firstElementChild;
    if (anchor.dataset.view === parent) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
    if (anchor.dataset.view === parent) link.scrollIntoView({ block: "nearest", inline: "nearest" }); // a phone has not room for all
  }
  document.title = `${title}${at.rest.length ? ` ${at.rest.join(" ")}` : ""} · Phalanx`;
  const mine = ++entered;
  const loaded = await part(`views/${FILES[at.name] ?? at.name}.js`);
  if (mine !== entered) return undefined; // one has gone on meanwhile
  if (!loaded) { shown = ""; return undefined; }
  // A view that one has left no longer writes its address over another's.
  const goFrom = (path, query, replace) => { if (!replace || mine === entered) go(path, query, replace); };
  view = loaded[`${at.name}View`]({ rest: at.rest, query: at.query, go: goFrom, live });
  content.replaceChildren(view.node);
  scrollTo(0, 0);
  return refresh();
}

// A part of the page that is not needed at once; null: it cannot be had, which is said.
async function part(file) {
  try {
    const found = await import(`./${file}`);
    notice("part", "");
    return found;
  } catch (problem) {
    console.error(problem);
    notice("part", "A part of this page cannot be loaded: the server is away, or was renewed.", "bad",
      h("button", { class: "button primary", type: "button", onclick: () => location.reload() }, "Reload"));
    return null;
  }
}

// Whoever knows the keys types on at once: only the first time is anything waited for.
async function openPalette() {
  const loaded = palette ? null : await part("lib/palette.js");
  if (!(palette || loaded) || !rail.isConnected) return; // one may have been signed out meanwhile
  palette ??= new loaded.Palette([...Object.entries(VIEWS), ["submit", "Submit a job"]].map(([name, title]) => [title, `#/${name}`]));
  palette.open();
}

// All other views are fetched while nobody waits: going to one is instant then, also while the server is away.
function fetchAll() {
  const views = JSON.parse(document.querySelector('meta[name="page-views"]').content);
  for (const file of new Set([...LATER, ...Object.values(views).flat()])) {
    const address = new URL(file, import.meta.url).pathname;
    if (!document.querySelector(`link[href="${address}"]`)) document.head.append(h("link", { rel: "modulepreload", href: address }));
  }
}

function frame() {
  if (rail.isConnected) return;
  main.replaceChildren(notices, content);
  app.prepend(rail, top);
  live.open();
}

// Views are refreshed when something happened, not more often than a person can see.
function refreshSoon() {
  if (timer) return;
  timer = setTimeout(() => { timer = 0; refresh(); }, Math.max(0, last + LEAST_MS - Date.now()));
}

async function refresh() {
  if (view && refreshing === view) { wanted = true; return; } // one that was left keeps nobody waiting
  if (document.hidden && view) { wanted = true; return; }
  last = Date.now();
  const current = refreshing = view;
  try {
    await Promise.all([current?.refresh(), glance()]);
    notice("problem", "");
    if (current === view && current) document.documentElement.dataset.ready = shown; // one may have gone on meanwhile
    if (current && !fetched) { fetched = true; setTimeout(fetchAll, IDLE_MS); }
  } catch (problem) {
    if (problem.status === undefined) throw problem;
    if (current !== view) return;
    if (problem.status === 404) isMissing(problem.message);
    else if (problem.status !== 401 && problem.status !== 0) {
      notice("problem", problem.message, "bad");
      setTimeout(refreshSoon, RETRY_MS); // nothing may happen that would have it tried again
    }
  } finally {
    if (refreshing === current) refreshing = null;
    if (wanted) { wanted = false; refreshSoon(); }
  }
}

// What never was there has no figures and no curves, not even empty ones; what is gone keeps its last ones.
function isMissing(message) {
  if (document.documentElement.dataset.ready === shown) { notice("problem", message, "bad"); return; }
  view?.close?.();
  view = null;
  content.replaceChildren(empty(`${message[0].toUpperCase()}${message.slice(1)}`, h("a", { href: `#/${parent}` }, `See ${VIEWS[parent].toLowerCase()}`)));
  document.documentElement.dataset.ready = shown;
}

async function glance() {
  const { nodes: states, ...now } = await status();
  const nodes = Object.values(states).reduce((a, b) => a + b, 0);
  const lost = states.dead + states.quarantined;
  const running = (now.jobs.running ?? 0) + (now.jobs.forming ?? 0);
  facts.replaceChildren(
    h("b", {}, counted(nodes, "node")), lost ? h("span", { class: "bad" }, ` ${whole(lost)} lost`) : "",
    " · ", h("b", {}, `${whole(now.free_gpus)} of ${whole(now.gpus)}`), " GPUs free · ",
    h("b", {}, counted(running, "job")), ` running, ${whole(now.jobs.pending ?? 0)} waiting`);
  setText(about, `phalanx ${now.version}, epoch ${now.epoch}`);
  notice("store", now.problem ? `Nothing can be stored at the moment: ${now.problem}` : "", "bad");
  const asked = now.questions.filter((each) => each.nodes.length); // of the others the nodes are still being counted
  for (const each of asked) ask(each);
  for (const old of notices.querySelectorAll('[data-key^="question"]')) if (!asked.some((each) => `question-${each.question}` === old.dataset.key)) old.remove();
}

// Something that a person must decide: more nodes failed at once than the core may take out by itself.
async function ask({ question, about, nodes, causes }) {
  const key = `question-${question}`, text = `${about} ${nodes.join()}`;
  const shown = notices.querySelector(`[data-key="${key}"]`);
  if (shown?.asked === text) return;
  const [{ actionButton, answerOrder, refusedTo }, { token }] = await Promise.all([import("./lib/actions.js"), who()]);
  const refused = refusedTo(token.role, "admin");
  const button = (approve) => actionButton(answerOrder(question, nodes, approve, post, () => notice(key, "")), refused);
  const which = `${nodes.slice(0, 4).join(", ")}${nodes.length > 4 ? ` and ${whole(nodes.length - 4)} more` : ""} (${[...new Set(causes)].map(words).join(", ")})`;
  notice(key, `Somebody must decide: so many nodes failed at once that none more is taken out without a person's word: ${which}.`, "",
    button(true), button(false), h("a", { href: "#/events" }, "See why"));
  notices.querySelector(`[data-key="${key}"]`).asked = text;
}

// Signing in. A link carries a code that is good once; it leaves the address at once.
async function signIn([code = "", ...rest], query) {
  go(rest.map(encodeURIComponent).join("/") || "fleet", Object.fromEntries(query), true);
  if (code) {
    try {
      keepToken((await post("/v1/login", undefined, code)).secret);
      if (rail.isConnected) { live.open(); shown = ""; } // whoever was signed in before sees nothing more
    } catch (problem) {
      if (!hasToken()) return askToken(problem.code === "wrong_token" || problem.code === "link_used"
        ? "This link was used already. Make another with `phalanx page`." : problem.message);
    }
  }
  return enter();
}

async function askToken(why) {
  for (const box of document.querySelectorAll("dialog[open]")) box.close(); // it would lie over the form
  view?.close?.();
  view = null;
  shown = "";
  live.close();
  rail.remove();
  top.remove();
  const { loginView } = await import("./views/login.js");
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
// Whoever was signed in reads the same sentence, whichever answer was the first to refuse the token. It is
// forgotten, so that what is still under way with it, or is asked without one after that, does not take the form
// away from under a person's hands.
addEventListener("phalanx:login", ({ detail }) => {
  if (!hasToken()) return;
  const why = rail.isConnected ? "this token is not good any more" : detail;
  keepToken("");
  askToken(why);
});
addEventListener("hashchange", enter);
document.addEventListener("visibilitychange", () => { if (!document.hidden && wanted) { wanted = false; refresh(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.repaint?.());
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && rail.isConnected) { event.preventDefault(); openPalette(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (name && rail.isConnected) go(name);
});
setInterval(() => { if (rail.isConnected) refreshSoon(); }, BACKSTOP_MS);
tellTheme();
enter();
