// Numbers as people read them, in the same words as the command line's.

const UNITS = ["B", "KiB", "MiB", "GiB"];

/** 16777216 -> "16.0 MiB" */
export function size(nbytes) {
  let value = nbytes;
  for (const unit of UNITS) {
    if (Math.abs(value) < 1024) return `${unit === "B" || Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** A share of 1 -> "92.4 %" */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share > 0 && share < 0.9995 ? 1 : 0)} %`;
}

/** Three significant digits; "–" for nothing. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 100 || value === 0) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function count(value) {
  return value.toLocaleString("en");
}

/** 95 -> "1 min 35 s" */
export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function ago(value) {
  if (value === null || value === undefined) return "never";
  return value < 1 ? "just now" : `${seconds(value)} ago`;
}

/** "18:05:09", in the reader's time zone. */
export function clock(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}
