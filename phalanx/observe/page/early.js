// Before anything else: the chosen theme, so that a dark page never flashes white; then the files of the
// view that is opened and its first answers, so that nothing waits for what could have been asked already.
"use strict";
{
  const stored = (store, key) => {
    try {
      return store().getItem(key) ?? "";
    } catch {
      return ""; // storage may be forbidden: the system's theme, and a token that is asked for
    }
  };
  const chosen = stored(() => localStorage, "phalanx-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  const view = location.hash.match(/^#\/([a-z]+)/)?.[1] ?? "fleet";
  const files = JSON.parse(document.querySelector('meta[name="page-views"]').content);
  for (const file of files[view] ?? files[`${view}s`] ?? []) {
    document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", href: new URL(file, document.currentScript.src).pathname }));
  }
  const token = stored(() => sessionStorage, "phalanx-token");
  const first = location.hash.includes("?") ? [] : { fleet: ["/v1/fleet"], jobs: ["/v1/jobs?state=all&limit=100&newest=true"] }[view] ?? [];
  const ask = (path) => {
    const answer = fetch(path, { headers: { Authorization: `Bearer ${token}` } });
    answer.catch(() => {}); // whoever takes it says so
    return [path, answer];
  };
  globalThis.phalanxEarly = { token, answers: token && view !== "login" ? Object.fromEntries(["/v1/status", ...first].map(ask)) : {} };
}
