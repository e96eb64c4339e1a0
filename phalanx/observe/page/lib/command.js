// The command line that does the same as a button: shown beside it, copied with one click.
import { h, setText } from "./dom.js";

const PLAIN = /^[A-Za-z0-9_@%+=:,./-]+$/;
const quoted = (word) => (PLAIN.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
export const shellWords = (...words) => words.filter((each) => each !== "" && each !== undefined).map((each) => quoted(String(each))).join(" ");

const COPIED_MS = 1500;

export class CommandLine {
  constructor(text = "") {
    this.code = h("code", { tabIndex: 0 });
    this.copied = h("button", { type: "button", class: "quiet", onclick: () => this.copy() }, "Copy");
    this.node = h("div", { class: "command", role: "group", "aria-label": "The same from a terminal" }, h("span", { "aria-hidden": "true" }, "$"), this.code, this.copied);
    this.set(text);
  }

  set(text) { setText(this.code, text); this.node.hidden = !text; }

  // Where the page may not write into the clipboard, the words are marked for the keyboard.
  async copy() {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      setText(this.copied, "Copied");
    } catch {
      getSelection().selectAllChildren(this.code);
      setText(this.copied, "Marked");
    }
    setTimeout(() => setText(this.copied, "Copy"), COPIED_MS);
  }
}

export const commandNode = (text) => new CommandLine(text).node;
