import { h } from "./dom.js";
import { GLYPH, TONE } from "./format.js";

export const state = (name, text = name) =>
  h("span", { class: `state ${TONE[name] ?? ""}`, "data-glyph": GLYPH[name] ?? "·" }, text);
