// The server: requests with the token, and the live socket that comes back by itself.
const KEY = "phalanx-token";
let token = "";
try { token = sessionStorage.getItem(KEY) ?? ""; } catch { /* storage may be forbidden */ }

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasToken = () => Boolean(token);

let me = null;
export const who = () => (me ??= get("/v1/whoami").catch((problem) => { me = null; throw problem; })); // the token's role, asked once

export function keepToken(secret) {
  token = secret;
  me = null;
  try {
    if (secret) sessionStorage.setItem(KEY, secret);
    else sessionStorage.removeItem(KEY);
  } catch { /* then it lasts as long as this page */ }
}

// A tab that was just opened asks the others of this browser; nothing is kept on disk.
const tabs = new BroadcastChannel("phalanx");
tabs.onmessage = ({ data }) => { if (data === "who" && token) tabs.postMessage({ token }); };
const ASK_MS = 150;

export function askOtherTabs() {
  return new Promise((done) => {
    const listen = ({ data }) => { if (data?.token) { keepToken(data.token); finish(); } };
    const finish = () => { tabs.removeEventListener("message", listen); done(); };
    tabs.addEventListener("message", listen);
    tabs.postMessage("who");
    setTimeout(finish, ASK_MS);
  });
}

// What early.js has asked for while this file was on its way, each good once.
function asked(path, bearer) {
  const { answers = {}, token: early } = globalThis.phalanxEarly ?? {};
  const answer = answers[path];
  delete answers[path];
  return answer && early === bearer ? answer : null;
}

// options.key: asked again with the same key, it is done once.
export async function call(path, options = {}, bearer = token) {
  const headers = { Authorization: `Bearer ${bearer}`, ...(options.body ? { "Content-Type": "application/json" } : {}), ...(options.key ? { "Idempotency-Key": options.key } : {}) };
  let answer;
  try {
    answer = await ((options.method ? null : asked(path, bearer)) ?? fetch(path, { ...options, headers }));
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refused(0, "unreachable", "the server does not answer");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const { code = "refused", message = `the server says ${answer.status}` } = body.error ?? {};
  if (answer.status === 401 && bearer === token) dispatchEvent(new CustomEvent("phalanx:login", { detail: message }));
  throw new Refused(answer.status, code, message);
}

// Integers beyond 2^53 (GPU-nanoseconds of a fleet) stay whole, as texts.
const exact = (_, value, context) =>
  (typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source ? context.source : value);
export const getExact = async (path) => JSON.parse(await (await call(path)).text(), exact);

export const get = async (path, options) => (await call(path, options)).json();

// The shell and a view want it at the same moment: it is asked for once.
let statusNow = null;
export const status = () => (statusNow ??= get("/v1/status").finally(() => { statusNow = null; }));

export const post = async (path, body, bearer) =>
  (await call(path, { method: "POST", body: body === undefined ? undefined : JSON.stringify(body) }, bearer)).json();

export async function* stream(path, signal) {
  const reader = (await call(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const LONGEST_MS = 15_000;
const SILENT_MS = 40_000; // the server says something at least every 15 s

export class Live extends EventTarget {
  constructor() {
    super();
    this.state = "connecting"; // live, away
    this.tries = 0;
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.hurry(); });
  }

  open() {
    this.close();
    const socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}/v1/live`);
    this.socket = socket;
    socket.onopen = () => { socket.send(token); this.watch(); };
    socket.onmessage = ({ data }) => {
      this.watch();
      const message = JSON.parse(data);
      if (message.kind === "ready") {
        this.tries = 0;
        this.set("live");
      }
      this.dispatchEvent(new CustomEvent("message", { detail: message }));
    };
    socket.onclose = ({ code }) => {
      if (this.socket !== socket) return;
      this.socket = null;
      clearTimeout(this.silence);
      if (code === 4401) { if (token) dispatchEvent(new CustomEvent("phalanx:login")); return; }
      this.set("away");
      const wait = Math.min(LONGEST_MS, 400 * 1.7 ** this.tries++) * (0.7 + 0.6 * Math.random());
      this.retry = setTimeout(() => this.open(), wait);
    };
  }

  watch() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.socket?.close(), SILENT_MS);
  }

  hurry() {
    if (this.state === "away" && !this.socket) { this.tries = 0; this.open(); }
  }

  close() {
    clearTimeout(this.retry);
    clearTimeout(this.silence);
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  set(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
