// The ends of ranks' logs, as they grow: filtered, searched, with the way to the first error.
import { stream } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { h, setText } from "./dom.js";
import { counted } from "./format.js";

const MOST_CHARACTERS = 400_000;
const AGAIN_MS = 2000, TYPED_MS = 400;
const TAIL = 65_536, LONG_TAIL = 1 << 20, WHOLE = 16 << 20;
const SINCE = [["", "newest"], ["60", "last minute"], ["600", "last 10 minutes"], ["3600", "last hour"], ["86400", "last day"]];
const RANKS = /^\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*$/;
// What a person looks for first; words that only mention errors ("0 errors") are not it.
export const ERROR = /\b(traceback|exception|fatal|panic|segmentation fault|killed|aborted|out of memory|[a-z]*error)\b(?!s?\s*[:=]?\s*0\b)|\bnccl\b.*\b(timeout|timed out|abort)/i;
export const firstError = (lines) => lines.findIndex((line) => ERROR.test(line) && !/\b(0|no) errors?\b/i.test(line));

export class LogPane {
  // told: gets what is shown, for the address
  constructor(job, told = () => {}) {
    Object.assign(this, { job, told });
    this.rank = h("input", { class: "field", inputmode: "numeric", pattern: RANKS.source, value: "0", title: "One rank, or several like 0,4-7", "aria-label": "Ranks", onchange: () => this.changed() });
    this.search = h("input", { class: "field", type: "search", placeholder: "Search the logs", "aria-label": "Search the logs", maxlength: 200, oninput: () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.changed(), TYPED_MS); } });
    this.since = h("select", { class: "pick", "aria-label": "Since", onchange: () => this.changed() }, SINCE.map(([value, text]) => h("option", { value }, text)));
    this.follow = h("input", { type: "checkbox", checked: true, id: "follow" });
    this.error = h("button", { class: "button", type: "button", onclick: () => this.toError() }, "First error");
    this.state = h("span", { class: "muted small", role: "status" });
    this.pane = h("pre", { class: "log", tabIndex: 0, role: "log", "aria-label": "Log" });
    this.line = new CommandLine();
    this.node = h("div", {}, h("div", { class: "bar logbar" }, h("label", { class: "rank" }, "Ranks", this.rank), this.search, this.since, this.error,
      h("label", { class: "nowrap" }, this.follow, " follow"), this.state), this.pane, h("div", { class: "under" }, this.line.node));
    this.text = "";
    this.dropped = 0;
  }

  // As an address says it.
  read(query) {
    if (RANKS.test(query.get("ranks") ?? "")) this.rank.value = query.get("ranks");
    this.search.value = (query.get("log") ?? "").slice(0, 200);
    this.since.value = SINCE.some(([value]) => value === query.get("since")) ? query.get("since") : "";
  }

  get shown() { return { ranks: this.rank.value === "0" ? "" : this.rank.value.replace(/\s/g, ""), log: this.search.value.trim(), since: this.since.value }; }

  changed() {
    this.told(this.shown);
    return this.open();
  }

  // The log of a rank from far back, shown where its first error is.
  openAtError(rank) {
    this.rank.value = String(rank);
    this.seeking = true;
    this.follow.checked = false;
    return this.open(LONG_TAIL);
  }

  async open(tail = TAIL) {
    this.close();
    const abort = this.abort = new AbortController();
    const ranks = this.rank.value.replace(/\s/g, "");
    if (!RANKS.test(ranks)) return setText(this.state, "ranks are numbers, like 0,4-7");
    const several = /[,-]/.test(ranks), { log, since } = this.shown;
    this.line.set(shellWords("phalanx", "logs", "-f", this.job, several ? "--ranks" : "--rank", ranks, ...(log ? ["--grep", `(?i)${log.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}`] : []), ...(since ? ["--since", `${since}s`] : [])));
    this.text = "";
    this.dropped = 0;
    setText(this.state, "opening");
    try {
      const path = `/v1/jobs/${this.job}/logs?${several ? `ranks=${ranks}` : `rank=${ranks}`}&tail_bytes=${log || since ? WHOLE : tail}&follow=true${since ? `&since_seconds=${since}` : ""}${log ? `&grep=${encodeURIComponent(log)}` : ""}`;
      for await (const part of stream(path, abort.signal)) {
        this.text += part;
        if (this.text.length > MOST_CHARACTERS) {
          const cut = this.text.indexOf("\n", this.text.length - MOST_CHARACTERS) + 1;
          this.dropped += cut;
          this.text = this.text.slice(cut);
        }
        this.soon();
      }
      setText(this.state, "the log has ended");
    } catch (problem) {
      if (problem.name === "AbortError") return;
      const refused = problem.status > 0;
      setText(this.state, refused ? problem.message : "the log broke off, trying again");
      if (!refused || problem.status === 503) this.retry = setTimeout(() => this.open(tail), AGAIN_MS);
    }
  }

  soon() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.show(); }); }

  show() {
    const shown = this.text.split("\n");
    const error = firstError(shown);
    this.error.disabled = error < 0;
    this.pane.replaceChildren(...(error < 0 ? [shown.join("\n")] : [shown.slice(0, error).map((line) => `${line}\n`).join(""), this.mark = h("mark", { class: "error" }, shown[error]), `\n${shown.slice(error + 1).join("\n")}`]));
    if (error < 0) this.mark = null;
    setText(this.state, `${counted(shown.length, "line")}${this.dropped ? `, ${counted(this.dropped, "character")} earlier ones left out` : ""}`);
    if (this.seeking && error >= 0) { this.seeking = false; this.toError(); } else if (this.follow.checked) this.pane.scrollTop = this.pane.scrollHeight;
  }

  toError() {
    if (!this.mark) return;
    this.follow.checked = false;
    this.pane.scrollTop = Math.max(0, this.mark.offsetTop - this.pane.offsetTop - this.pane.clientHeight / 3);
  }

  close() {
    clearTimeout(this.retry);
    clearTimeout(this.typing);
    this.abort?.abort();
  }
}
