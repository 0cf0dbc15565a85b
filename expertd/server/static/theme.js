// Light, dark, or as the system is; and the colours of style.css as numbers for what is drawn on canvas.

const KEY = "expertd.theme";
const WORDS = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = { auto: "◐", light: "☀", dark: "☾" };
const probe = document.createElement("i");
const resolved = new Map();

/** Sets the kept choice up; calls `changed` whenever the colours are other ones. */
export function startTheme(changed) {
  const button = document.getElementById("theme");
  const icon = document.getElementById("theme-icon");
  let choice = localStorage.getItem(KEY) ?? "auto";
  const changedNow = () => {
    resolved.clear();
    changed();
  };
  const apply = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    icon.textContent = ICONS[choice];
    button.setAttribute("aria-label", `Theme: ${WORDS[choice]}`);
    button.title = `Theme: ${WORDS[choice]}`;
    changedNow();
  };
  button.addEventListener("click", () => {
    const order = matchMedia("(prefers-color-scheme: dark)").matches ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
    choice = order[(order.indexOf(choice) + 1) % order.length];
    localStorage.setItem(KEY, choice);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changedNow);
  document.body.append(probe);
  probe.hidden = true;
  apply();
}

/** A colour of style.css, resolved: "rgb(…)". */
export function colour(name) {
  if (!resolved.has(name)) {
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

/** The same as [r, g, b]. */
export function rgb(name) {
  return colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
}
