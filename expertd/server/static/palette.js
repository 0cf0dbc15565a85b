// One colour for each of the 256 values of a cell: two bits of state above six bits of heat.

import { rgb } from "./theme.js";

export const STATES = ["on disk", "resident", "pinned", "just missed"];
const RAMPS = [
  ["cold-0", "cold-1"],
  ["warm-0", "warm-1", "warm-2", "warm-3", "warm-4"],
  ["pin-0", "pin-1", "pin-2"],
  ["miss-0", "miss-1"],
];
// Half of all experts are colder than the median: the ramp's bright end is kept for the hottest.
const GAMMA = 1.8;

/** RGBA of every cell value, as ImageData wants it. */
export function palette() {
  const colours = new Uint8ClampedArray(256 * 4);
  RAMPS.forEach((names, state) => {
    const stops = names.map(rgb);
    for (let heat = 0; heat < 64; heat++) {
      colours.set([...mix(stops, (heat / 63) ** GAMMA), 255], (state * 64 + heat) * 4);
    }
  });
  return new Uint32Array(colours.buffer);
}

function mix(stops, share) {
  const place = share * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((from, i) => from + (stops[low + 1][i] - from) * (place - low));
}

/** The legend's little ramps. */
export function drawRamps(colours) {
  for (const canvas of document.querySelectorAll("canvas.ramp")) {
    const first = Number(canvas.dataset.state) * 64;
    const image = new ImageData(64, 1);
    // Evenly by what is seen, not by heat: the legend shows the colours.
    for (let i = 0; i < 64; i++) new Uint32Array(image.data.buffer)[i] = colours[first + Math.round(63 * (i / 63) ** (1 / GAMMA))];
    canvas.getContext("2d").putImageData(image, 0, 0);
  }
}
