// Views that people keep by name, on the server: their team finds them too.
import { Refused, call, get, who } from "./api.js";
import { CommandLine, shellWords } from "./command.js";
import { h, fill, setText } from "./dom.js";

export class SavedViews {
  constructor(view) {
    this.view = view;
    this.pick = h("select", { class: "pick", "aria-label": "Saved views", onchange: () => { if (this.pick.value) location.hash = this.pick.value; this.pick.value = ""; } });
    this.name = h("input", { class: "field", placeholder: "Name", "aria-label": "Name of the view", maxlength: 128, pattern: "[A-Za-z0-9][A-Za-z0-9._@\\-]*", required: true });
    this.said = h("p", { class: "small muted", role: "status" });
    this.line = new CommandLine();
    this.list = h("ul", { class: "list small" });
    this.form = h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); this.save(); } }, this.name, h("button", { class: "button" }, "Save"));
    this.more = h("details", { class: "saver" }, h("summary", { class: "button" }, "Save view"), h("div", { class: "hint" }, this.form, this.said, this.line.node, this.list));
    this.node = h("div", { class: "bar views" }, this.pick, this.more);
  }

  async refresh() {
    const [{ views }, me] = await Promise.all([get("/v1/views"), who()]);
    this.more.hidden = me.token.role === "read";
    const own = views.filter((each) => each.address.startsWith(`#/${this.view}`));
    this.pick.hidden = !own.length;
    fill(this.list, own, (each) => each.name, (each) => h("li", { class: "bar" }, h("a", { href: each.address }, each.name), h("span", { class: "faint" }, each.by),
      h("button", { type: "button", class: "quiet", "aria-label": `Keep the view ${each.name} no longer`, onclick: () => this.drop(each.name) }, "✕")));
    fill(this.pick, [{ name: "Saved views", address: "" }, ...own], (each) => each.name, (each) => h("option", { value: each.address }, each.address ? `${each.name} (${each.by})` : each.name));
  }

  drop(name) { return this.change(name, { method: "DELETE" }, "It is not kept any more."); }

  save() {
    this.line.set(shellWords("phalanx", "page", location.hash.slice(2), "--save", this.name.value));
    return this.change(this.name.value, { method: "PUT", body: JSON.stringify({ address: location.hash }) }, "Kept: everybody of your team finds it here.");
  }

  async change(name, how, said) {
    try {
      await call(`/v1/views/${encodeURIComponent(name)}`, how);
      setText(this.said, said);
      this.name.value = "";
      await this.refresh();
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      setText(this.said, problem.message);
    }
  }
}
