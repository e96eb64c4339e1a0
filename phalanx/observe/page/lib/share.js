// A view as one file: what is seen now, with its styles and pictures, for whoever has no account here.
import { h, setText } from "./dom.js";

const MOST_MS = 1500;
const LATER = "data-picture"; // here, where pictures come from files alone, it is not one yet
const DROPPED = "button, input, select, textarea, form, dialog, details:not([open]) > :not(summary), .acts, .hint, .views, [hidden]";

// Fonts are left out: the reader's own take their place.
async function styles() {
  const sheets = await Promise.all([...document.querySelectorAll('link[rel="stylesheet"]')].map(async (link) => (await fetch(link.href)).text()));
  return sheets.join("\n").replace(/@font-face\s*{[^}]*}/g, "");
}

function copied(content) {
  const copy = content.cloneNode(true), canvases = content.querySelectorAll("canvas");
  [...copy.querySelectorAll("canvas")].forEach((canvas, i) => {
    const { width } = canvases[i].getBoundingClientRect();
    const picture = h("img", { [LATER]: width ? canvases[i].toDataURL("image/png") : "", alt: canvas.getAttribute("aria-label") ?? "" });
    canvas.replaceWith(picture);
  });
  for (const each of copy.querySelectorAll(DROPPED)) each.remove();
  for (const link of copy.querySelectorAll("a[href]")) link.setAttribute("href", new URL(link.getAttribute("href"), location.href).href);
  return copy;
}

// Written as text: a document of its own would have this page's policy, which allows no styles inside.
export async function shared(content) {
  const written = new Date().toISOString().replace("T", " ").slice(0, 19);
  const from = h("p", { class: "small muted" }, `${document.title}, as it was ${written} UTC: `, h("a", { href: location.href }, location.href));
  const title = h("title", {}, document.title), { theme } = document.documentElement.dataset;
  const style = `${await styles()}\nbody { padding: 1.4rem; } .runtable, .log, .story { max-height: none; } img { width: 100%; }`;
  return `<!doctype html>
<html lang="en"${theme ? ` data-theme="${theme === "dark" ? "dark" : "light"}"` : ""}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
${title.outerHTML}
<style>
${style}
</style>
</head>
<body>
${from.outerHTML}
${copied(content).outerHTML.replaceAll(`<img ${LATER}=`, "<img src=")}
</body>
</html>
`;
}

// As a file of the visitor's; the button that was pressed says so.
export async function save(content, button) {
  const file = new Blob([await shared(content)], { type: "text/html" });
  const link = h("a", { href: URL.createObjectURL(file), download: `${document.title.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase()}.html` });
  link.click();
  setText(button, "Saved");
  setTimeout(() => { URL.revokeObjectURL(link.href); setText(button, "Share"); }, MOST_MS);
}
