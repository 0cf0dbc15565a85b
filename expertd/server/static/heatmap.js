// The heat map: layers down, experts across, one byte a cell, on one canvas. Draws only when something changed.

import { STATES, drawRamps, palette } from "./palette.js";
import { colour } from "./theme.js";

const LEFT = 34;
const TOP = 6;
const BOTTOM = 20;
const WANTED_HEIGHT = 480;
const LARGEST_CELL = 30;
const GAP_FROM = 5;

export class HeatMap {
  /** `onFocus(cell or null, how)` is called with {layer, expert, state, heat, x, y, width, height} in CSS pixels. */
  constructor(canvas, onFocus) {
    this.canvas = canvas;
    this.onFocus = onFocus;
    this.body = new Uint8Array(0);
    this.layers = [];
    this.experts = 0;
    this.focus = null;
    this.draws = 0;
    this.small = document.createElement("canvas");
    this.asked = false;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#set(null, "pointer"));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#set(null, "keyboard"));
    canvas.addEventListener("focus", () => {
      if (this.focus === null && canvas.matches(":focus-visible")) this.#set([0, 0], "keyboard");
    });
    new ResizeObserver(() => this.#measure()).observe(canvas.parentElement);
  }

  /** New cells, row by row. */
  show(body, layers, experts) {
    const other = layers.length !== this.layers.length || experts !== this.experts;
    Object.assign(this, { body, layers, experts });
    if (other) this.#measure();
    this.#draw();
  }

  recolour() {
    this.colours = palette();
    drawRamps(this.colours);
    this.#draw();
  }

  /** [on disk, resident, pinned, just missed], of all experts or of one row. */
  counts(row) {
    const found = [0, 0, 0, 0];
    const from = row === undefined ? 0 : row * this.experts;
    const to = row === undefined ? this.body.length : from + this.experts;
    for (let i = from; i < to; i++) found[this.body[i] >> 6]++;
    return found;
  }

  /** What is known of a cell without asking. */
  cell([row, expert]) {
    const value = this.body[row * this.experts + expert] ?? 0;
    const scale = devicePixelRatio;
    return {
      layer: this.layers[row], expert, state: value >> 6, heat: value & 63, words: STATES[value >> 6],
      x: LEFT + (expert * this.cw) / scale, y: TOP + (row * this.ch) / scale, width: this.cw / scale, height: this.ch / scale,
    };
  }

  /** Device pixels a cell, as large as the card allows: whole ones where cells are small, else the width is used up. */
  #measure() {
    if (!this.experts) return;
    const scale = devicePixelRatio;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const room = ((width - LEFT) * scale) / this.experts;
    this.cw = room >= GAP_FROM * scale ? room : Math.max(1, Math.floor(room));
    const tall = Math.floor((WANTED_HEIGHT * scale) / this.layers.length);
    this.ch = Math.max(Math.min(tall, Math.round(LARGEST_CELL * scale), Math.round(Math.max(this.cw * 3, 3 * scale))), Math.ceil(2 * scale));
    const pixels = [LEFT * scale + this.cw * this.experts, this.ch * this.layers.length + (TOP + BOTTOM) * scale];
    this.canvas.width = Math.round(pixels[0]);
    this.canvas.height = Math.round(pixels[1]);
    this.canvas.style.width = `${pixels[0] / scale}px`;
    this.canvas.style.height = `${pixels[1] / scale}px`;
    this.#draw();
  }

  #draw() {
    if (this.asked || !this.experts || !this.colours || !this.cw) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.#paint();
    });
  }

  #paint() {
    const { experts, layers, body, cw, ch } = this;
    const rows = layers.length;
    this.draws++;
    const image = new ImageData(experts, rows);
    const out = new Uint32Array(image.data.buffer);
    for (let i = 0; i < body.length; i++) out[i] = this.colours[body[i]];
    this.small.width = experts;
    this.small.height = rows;
    this.small.getContext("2d").putImageData(image, 0, 0);
    const pen = this.canvas.getContext("2d");
    const left = Math.round(LEFT * devicePixelRatio);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.translate(0, Math.round(TOP * devicePixelRatio));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.small, left, 0, Math.round(cw * experts), ch * rows);
    this.#gaps(pen, left);
    this.#marks(pen, left);
    this.#axes(pen, left);
    this.#outline(pen, left);
  }

  #gaps(pen, left) {
    const { experts, layers, cw, ch } = this;
    const gap = Math.max(1, Math.round(devicePixelRatio));
    pen.fillStyle = colour("card");
    if (Math.min(cw, ch) < GAP_FROM * devicePixelRatio) return;
    for (let i = 1; i <= experts; i++) pen.fillRect(left + Math.round(i * cw) - gap, 0, gap, ch * layers.length);
    for (let i = 1; i <= layers.length; i++) pen.fillRect(left, i * ch - gap, cw * experts, gap);
  }

  /** Where cells are large, a dot tells what is pinned to those who do not see the colours apart. */
  #marks(pen, left) {
    const { experts, body, cw, ch } = this;
    if (Math.min(cw, ch) < 8 * devicePixelRatio) return;
    const side = Math.max(2, Math.round(Math.min(cw, ch) / 4));
    pen.fillStyle = colour("card");
    for (let i = 0; i < body.length; i++) {
      if (body[i] >> 6 !== 2) continue;
      const [x, y] = [left + Math.round((i % experts) * cw), Math.floor(i / experts) * ch];
      pen.fillRect(x + Math.round((cw - side) / 2), y + Math.round((ch - side) / 2), side, side);
    }
  }

  #axes(pen, left) {
    const { experts, layers, cw, ch } = this;
    const scale = devicePixelRatio;
    pen.fillStyle = colour("muted");
    pen.font = `${11 * scale}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const everyRow = step((14 * scale) / ch);
    for (let i = 0; i < layers.length; i += everyRow) pen.fillText(layers[i], left - 8 * scale, i * ch + ch / 2);
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const everyColumn = step((34 * scale) / cw);
    for (let i = 0; i < experts; i += everyColumn) pen.fillText(i, left + i * cw + cw / 2, layers.length * ch + 6 * scale);
  }

  #outline(pen, left) {
    if (this.focus === null) return;
    const [row, expert] = this.focus;
    const thick = Math.max(2, Math.round(2 * devicePixelRatio));
    pen.lineWidth = thick;
    pen.strokeStyle = colour("text");
    pen.strokeRect(left + Math.round(expert * this.cw) - thick / 2, row * this.ch - thick / 2, this.cw + thick / 2, this.ch + thick / 2);
  }

  #point(event) {
    const scale = devicePixelRatio;
    const expert = Math.floor(((event.offsetX - LEFT) * scale) / this.cw);
    const row = Math.floor(((event.offsetY - TOP) * scale) / this.ch);
    const inside = expert >= 0 && expert < this.experts && row >= 0 && row < this.layers.length;
    this.#set(inside ? [row, expert] : null, "pointer");
  }

  #key(event) {
    if (!this.experts) return;
    const [row, expert] = this.focus ?? [0, 0];
    const last = [this.layers.length - 1, this.experts - 1];
    const to = {
      ArrowLeft: [row, expert - 1], ArrowRight: [row, expert + 1], ArrowUp: [row - 1, expert], ArrowDown: [row + 1, expert],
      Home: [row, 0], End: [row, last[1]], PageUp: [0, expert], PageDown: [last[0], expert],
    }[event.key];
    if (event.key === "Escape") this.#set(null, "keyboard");
    if (!to) return;
    event.preventDefault();
    this.#set([Math.max(0, Math.min(last[0], to[0])), Math.max(0, Math.min(last[1], to[1]))], "keyboard");
  }

  #set(focus, how) {
    if (String(focus) === String(this.focus)) return;
    this.focus = focus;
    this.#draw();
    this.onFocus(focus === null ? null : this.cell(focus), how);
  }
}

/** 1, 2, 4, 8 … : the least that is not below `least`. */
function step(least) {
  let found = 1;
  while (found < least) found *= 2;
  return found;
}
