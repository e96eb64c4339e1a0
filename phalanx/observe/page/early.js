// Before anything is painted: the chosen theme, so that a dark page never flashes white.
"use strict";
try {
  const chosen = localStorage.getItem("phalanx-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; the system's theme is used.
}
