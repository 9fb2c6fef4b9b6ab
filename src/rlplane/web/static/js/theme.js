// Dark or light: the system's choice, until somebody chooses here.

const KEY = "rlplane-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

export const isDark = () =>
  (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

export function onThemeChange(listener) {
  listeners.push(listener);
}

export function toggleTheme() {
  apply(isDark() ? "light" : "dark");
  try {
    localStorage.setItem(KEY, document.documentElement.dataset.theme);
  } catch {
    // Storage may be forbidden: then the choice lasts as long as the page.
  }
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

export function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem(KEY);
  } catch {
    stored = null;
  }
  apply(stored === "dark" || stored === "light" ? stored : null);
  system.addEventListener("change", () => apply(null));
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
