import { h, svg } from "../lib/dom.js";
import { SHIELDS } from "../lib/icons.js";

export function loginView(why, open) {
  const problem = h("p", { class: "bad", role: "alert" }, why);
  const field = h("input", {
    id: "token", class: "field mono", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-label": "Token",
  });
  const form = h("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      problem.textContent = "";
      try {
        await open(field.value.trim());
      } catch (error) {
        problem.textContent = error.message;
        field.select();
      }
    },
  }, h("label", { for: "token" }, "Token"), field, h("button", { class: "button primary" }, "Open"));
  setTimeout(() => field.focus());
  return h("div", { class: "login" },
    svg("0 0 46 26", ...SHIELDS), h("h1", {}, "Phalanx"), form, problem,
    h("p", {}, "A link that signs you in is printed by ", h("code", {}, "phalanx page"),
      ". The administrator’s token is in the file ", h("code", {}, "admin.token"), " of the server’s state folder."));
}
