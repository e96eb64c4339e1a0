// Light, dark, or as the system says; and the theme's colours for canvases.
const ORDER = ["system", "light", "dark"];
export const themeName = () => document.documentElement.dataset.theme ?? "system";
export const nextTheme = () => ORDER[(ORDER.indexOf(themeName()) + 1) % ORDER.length];

export function toggleTheme() {
  const next = nextTheme();
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("phalanx-theme", next); } catch { /* then it lasts as long as this page */ }
}

const NAMES = ["paper", "surface", "raised", "sunken", "ink", "soft", "faint", "line", "strong-line", "accent", "accent-wash",
  "good", "warn", "bad", "other", "idle", "bad-wash"];
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const found = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  found.dark = style.colorScheme === "dark";
  return found;
}

// Hues that stay apart for most eyes (after Okabe and Ito), for jobs and runs side by side.
const SERIES = {
  light: ["#1f4f96", "#c2571a", "#2c7f77", "#8a4fa0", "#8c6a00", "#4a90c2", "#b04a6a", "#5f6f2a"],
  dark: ["#8ab8f5", "#f29a5c", "#5cb8ac", "#c79be0", "#d9b84a", "#7cc4ea", "#e88aa6", "#a9bd6a"],
};
export const seriesColour = (index) => SERIES[colours().dark ? "dark" : "light"][((index % 8) + 8) % 8];
