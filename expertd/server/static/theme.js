// Light, dark, or as the system is; and the colours of style.css as numbers for what is drawn on canvas.

const KEY = "expertd.theme";
const WORDS = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = { auto: "◐", light: "☀", dark: "☾" };
const probe = document.createElement("i");

/** Sets the kept choice up; calls `changed` whenever the colours are other ones. */
export function startTheme(changed) {
  const button = document.getElementById("theme");
  const icon = document.getElementById("theme-icon");
  let choice = localStorage.getItem(KEY) ?? "auto";
  const apply = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    icon.textContent = ICONS[choice];
    button.setAttribute("aria-label", `Theme: ${WORDS[choice]}`);
    button.title = `Theme: ${WORDS[choice]}`;
    changed();
  };
  button.addEventListener("click", () => {
    const order = matchMedia("(prefers-color-scheme: dark)").matches ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
    choice = order[(order.indexOf(choice) + 1) % order.length];
    localStorage.setItem(KEY, choice);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  document.body.append(probe);
  probe.hidden = true;
  apply();
}

/** A colour of style.css, resolved: "rgb(…)". */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** The same as [r, g, b]. */
export function rgb(name) {
  return colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
}
