// The chosen runs by their colours, with the tags and notes that people give them.
import { Refused, call, post } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { fill, h, setText } from "./dom.js";
import { refusedTo } from "./actions.js";
import { seriesColour } from "./theme.js";

const TAG = /^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$/;

export class RunLabels {
  constructor(ontoggle, onchange) {
    Object.assign(this, { ontoggle, onchange });
    this.list = h("ul", { class: "chosenruns" });
    this.said = h("p", { class: "small", role: "status" });
    this.line = new CommandLine();
    this.node = h("div", {}, this.list, this.said, this.line.node);
  }

  show(runs, role) {
    const refused = refusedTo(role, "admin", "user");
    fill(this.list, runs.map((run, i) => [run, i, refused, seriesColour(i)]), ([run]) => run.job, ([run, , why, colour]) => {
      const tag = h("input", { class: "field", placeholder: "tag", "aria-label": `Tag of run ${run.job}`, disabled: Boolean(why), title: why, maxlength: 128 });
      const note = h("input", { class: "field", placeholder: "note", "aria-label": `Note about run ${run.job}`, disabled: Boolean(why), title: why, maxlength: 2000 });
      const form = h("form", { class: "label", onsubmit: (event) => { event.preventDefault(); this.label(run, tag, note); } }, tag, note, h("button", { class: "button", disabled: Boolean(why), title: why }, "Add"));
      return h("li", {}, h("span", { class: "swatch", style: { background: colour } }), h("a", { href: `#/job/${run.job}` }, `${run.job} ${run.name}`),
        h("span", { class: "tags" }, run.tags.map((each) => h("span", { class: "tag" }, each, why ? "" : h("button", { type: "button", class: "quiet", "aria-label": `Take tag ${each} from run ${run.job}`, onclick: () => this.retag(run, run.tags.filter((other) => other !== each), ["tag", run.job, `-${each}`]) }, "✕")))),
        form, h("button", { type: "button", class: "quiet", "aria-label": `Do not draw run ${run.job}`, onclick: () => this.ontoggle(run.job) }, "✕"));
    });
  }

  async label(run, tag, note) {
    const name = tag.value.trim(), text = note.value.trim();
    if (name && !TAG.test(name)) return this.say("a tag has letters, digits and . _ @ -", "bad");
    if (name) await this.retag(run, [...new Set([...run.tags, name])], ["tag", run.job, name]);
    if (text) await this.done(() => post(`/v1/runs/${run.job}/notes`, { text }), ["note", run.job, text]);
    tag.value = note.value = "";
  }

  retag(run, tags, command) {
    return this.done(() => call(`/v1/runs/${run.job}/tags`, { method: "PUT", body: JSON.stringify({ tags }) }), command);
  }

  async done(work, command) {
    try {
      await work();
      this.say("Done; the same from a terminal:", "muted");
      this.line.set(shellWords("phalanx", "runs", ...command));
      await this.onchange();
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      this.say(problem.message, "bad");
    }
  }

  say(text, tone) { this.said.className = `small ${tone}`; setText(this.said, text); }
}
