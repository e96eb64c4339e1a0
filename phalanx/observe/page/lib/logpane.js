// The end of a rank's log, as it grows. Lines are text; only the last ones are kept.
import { stream } from "./api.js";
import { h, setText } from "./dom.js";
import { counted } from "./format.js";

const MOST_CHARACTERS = 200_000;
const AGAIN_MS = 2000;

export class LogPane {
  constructor(job) {
    this.job = job;
    this.rank = h("input", { class: "field", type: "number", min: 0, value: 0, "aria-label": "Rank", onchange: () => this.open() });
    this.search = h("input", { class: "field", type: "search", placeholder: "Only lines with…", "aria-label": "Only lines with", oninput: () => this.show() });
    this.follow = h("input", { type: "checkbox", checked: true, id: "follow" });
    this.state = h("span", { class: "muted small", role: "status" });
    this.pane = h("pre", { class: "log", tabIndex: 0, "aria-label": "Log" });
    this.node = h("div", {}, h("div", { class: "bar logbar" }, h("label", { class: "rank" }, "Rank", this.rank), this.search,
      h("label", { class: "nowrap" }, this.follow, " follow"), this.state), this.pane);
    this.text = "";
    this.dropped = 0;
  }

  async open() {
    this.close();
    const abort = this.abort = new AbortController();
    this.text = "";
    this.dropped = 0;
    setText(this.state, "opening");
    try {
      const path = `/v1/jobs/${this.job}/logs?rank=${Number(this.rank.value) || 0}&tail_bytes=65536&follow=true`;
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
      if (!refused || problem.status === 503) this.retry = setTimeout(() => this.open(), AGAIN_MS);
    }
  }

  soon() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.show(); }); }

  show() {
    const wanted = this.search.value.toLowerCase();
    const lines = this.text.split("\n");
    const shown = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
    setText(this.pane, shown.join("\n"));
    setText(this.state, `${counted(shown.length, "line")}${this.dropped ? `, ${counted(this.dropped, "character")} earlier ones left out` : ""}`);
    if (this.follow.checked) this.pane.scrollTop = this.pane.scrollHeight;
  }

  close() {
    clearTimeout(this.retry);
    this.abort?.abort();
  }
}
