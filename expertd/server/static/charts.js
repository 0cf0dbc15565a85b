// The time series: one uPlot a figure, their cursors joined, and the same points for the table.

import { clock, number, percent, size } from "./format.js";
import { colour } from "./theme.js";

/* global uPlot */

const mib = (value) => (value === null ? null : value / 1048576);
const CHARTS = [
  { id: "tokens", title: "Tokens", unit: "tok/s", lines: [{ column: "tokens_per_second", label: "decoding", colour: "accent" }], say: number },
  {
    id: "hits", title: "Hit ratio", unit: "", say: percent, top: 1,
    lines: [{ column: "hit_ratio", label: "decoding", colour: "good" }, { column: "prompt_hit_ratio", label: "prompts", colour: "muted" }],
  },
  {
    id: "disk", title: "From the disk", unit: "MiB/s", say: number, top: 1,
    lines: [
      { column: "disk_read_bytes_per_second", label: "read", colour: "info", scale: mib },
      { column: "fetch_bytes_per_second", label: "asked for", colour: "muted", scale: mib },
    ],
  },
  { id: "faults", title: "Major faults", unit: "/s", lines: [{ column: "major_faults_per_second", label: "faults", colour: "bad" }], say: number },
  {
    id: "stalls", title: "Stalls", unit: "of the time", say: percent, top: 0.05,
    lines: [{ column: "wait_share", label: "asking for pages", colour: "violet" }, { column: "stall_share", label: "memory pressure", colour: "bad" }],
  },
  {
    id: "held", title: "Experts held", unit: "", say: (value) => (value === null ? "–" : size(value)),
    lines: [{ column: "resident_bytes", label: "resident", colour: "accent" }, { column: "budget_bytes", label: "budget", colour: "muted" }],
  },
];
const BINARY = Array.from({ length: 46 }, (_, i) => 2 ** i);
const KEPT = 900;
const HEIGHT = 118;
const TABLE_ROWS = 20;

export class Charts {
  constructor(box) {
    this.box = box;
    this.columns = ["at"];
    this.points = [];
    this.minutes = 10;
    this.plots = [];
    this.seconds = 2;
    this.parts = CHARTS.map((chart) => frame(box, chart));
    new ResizeObserver(() => this.#resize()).observe(box);
  }

  /** More points; `restarted` marks a gap that belongs to no daemon. */
  add(columns, points, seconds, restarted) {
    this.columns = columns;
    this.seconds = seconds;
    if (restarted && this.points.length) this.points.push(columns.map((_, i) => (i ? null : this.points.at(-1)[0] + 0.001)));
    this.points.push(...points);
    this.points.splice(0, Math.max(0, this.points.length - KEPT));
    if (points.length || restarted) this.draw();
  }

  show(minutes) {
    this.minutes = minutes;
    this.draw();
  }

  recolour() {
    this.plots.forEach((plot) => plot.destroy());
    this.plots = [];
    this.draw();
  }

  draw() {
    if (!this.box.offsetWidth) return;
    const end = this.points.at(-1)?.[0] ?? Date.now() / 1000;
    const begin = Math.max(end - 60 * this.minutes, Math.min(this.points[0]?.[0] ?? end, end - 60));
    CHARTS.forEach((chart, i) => {
      const data = this.#data(chart);
      this.plots[i] ??= this.#plot(chart, this.parts[i], data);
      this.plots[i].setData(data, false);
      this.plots[i].setScale("x", { min: begin, max: end });
      this.#say(chart, this.parts[i], data);
    });
  }

  /** Rows for the table, newest first: [heads, rows]. */
  table() {
    const heads = ["Time"];
    for (const chart of CHARTS) for (const line of chart.lines) heads.push(chart.lines.length > 1 ? `${chart.title}: ${line.label}` : chart.title);
    const rows = this.points.slice(-TABLE_ROWS).reverse().map((point) => {
      const row = [clock(point[0])];
      for (const chart of CHARTS) {
        for (const line of chart.lines) row.push(words(chart, (line.scale ?? same)(point[this.columns.indexOf(line.column)])));
      }
      return row;
    });
    return [heads, rows];
  }

  #data(chart) {
    const out = [this.points.map((point) => point[0])];
    for (const line of chart.lines) {
      const column = this.columns.indexOf(line.column);
      out.push(this.points.map((point) => (line.scale ?? same)(point[column] ?? null)));
    }
    return out;
  }

  #say(chart, part, data) {
    const last = data[1].at(-1);
    part.now.textContent = chart.say(last ?? null);
    part.unit.textContent = last === null || last === undefined ? "" : chart.unit;
    const known = data[1].filter((value) => value !== null);
    const range = known.length ? `, between ${words(chart, Math.min(...known))} and ${words(chart, Math.max(...known))} before` : "";
    part.plot.setAttribute("aria-label", `${chart.title}: now ${words(chart, last ?? null)}${range}`);
  }

  #plot(chart, part, data) {
    const grid = { stroke: colour("grid"), width: 1 };
    const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: part.plot.clientWidth, height: HEIGHT, legend: { show: false }, padding: [8, 16, 0, 0],
      cursor: { sync: { key: "expertd" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, chart.top ?? 0) || 1] } },
      axes: [
        { ...axis, size: 24, space: 60, values: (_, ticks) => ticks.map((t) => clock(t).slice(0, 5)) },
        { ...axis, size: 54, space: 30, incrs: chart.say === number || chart.say === percent ? undefined : BINARY, values: (_, ticks) => ticks.map((t) => tick(chart, t)) },
      ],
      series: [{}, ...chart.lines.map(series)],
      hooks: { setCursor: [(u) => this.#hover(chart, part, u)] },
    };
    return new uPlot(options, data, part.plot);
  }

  #hover(chart, part, plot) {
    const at = plot.cursor.idx;
    const texts = chart.lines.map((line, i) => {
      const value = at === null || at === undefined ? undefined : plot.data[i + 1][at];
      return value === undefined ? line.label : `${line.label} ${words(chart, value)}`;
    });
    part.keys.forEach((key, i) => (key.textContent = texts[i]));
    part.when.textContent = at === null || at === undefined ? "" : clock(plot.data[0][at]);
  }

  #resize() {
    this.plots.forEach((plot, i) => plot.setSize({ width: this.parts[i].plot.clientWidth, height: HEIGHT }));
    if (!this.plots.length) this.draw();
  }
}

function same(value) {
  return value;
}

function words(chart, value) {
  const said = chart.say(value);
  return said === "–" || !chart.unit ? said : `${said} ${chart.unit}`;
}

function tick(chart, value) {
  if (chart.say === number) return number(value);
  return chart.say === percent ? `${Math.round(100 * value)} %` : chart.say(value);
}

function series(line, index) {
  const stroke = colour(line.colour);
  const fill = index === 0 ? stroke.replace("rgb(", "rgba(").replace(")", ", 0.13)") : undefined;
  return { label: line.label, stroke, fill, width: index === 0 ? 1.8 : 1.2, dash: index ? [4, 3] : undefined, points: { show: false } };
}

/** The DOM of one chart; returns the parts that change. */
function frame(box, chart) {
  const part = {};
  const make = (tag, name, parent, text) => {
    const node = document.createElement(tag);
    node.className = name;
    if (text) node.textContent = text;
    parent.append(node);
    return node;
  };
  const whole = make("div", "chart", box);
  whole.id = `chart-${chart.id}`;
  const head = make("div", "chart-head", whole);
  make("h3", "", head, chart.title);
  part.now = make("span", "now", head, "–");
  part.unit = make("span", "unit", head);
  part.plot = make("div", "plot", whole);
  part.plot.setAttribute("role", "img");
  const keys = make("div", "keys", whole);
  part.keys = chart.lines.map((line) => {
    const key = make("span", "", keys);
    make("i", "", key).style.background = `var(--${line.colour})`;
    return make("span", "", key, line.label);
  });
  part.when = make("span", "when", keys);
  return part;
}
