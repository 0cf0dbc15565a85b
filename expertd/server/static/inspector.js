// What is said of the expert under the pointer or the keyboard's focus: at once what the map knows, then what the daemon knows.

import { Away, Missing, Unauthorized } from "./api.js";
import { ago, count, size } from "./format.js";

const SETTLE_MS = 70;

export class Inspector {
  constructor(api) {
    this.api = api;
    this.tip = document.getElementById("tip");
    this.said = document.getElementById("map-said");
    this.timer = 0;
    this.shown = null;
  }

  /** Called by the map. */
  focus(cell, how) {
    clearTimeout(this.timer);
    this.shown = cell;
    this.tip.hidden = cell === null;
    if (cell === null) {
      this.said.textContent = "";
      return;
    }
    this.#show(cell, []);
    this.timer = setTimeout(() => this.#ask(cell, how), SETTLE_MS);
  }

  async #ask(cell, how) {
    let found;
    try {
      found = await this.api.json(`expertd/experts?layer=${cell.layer}&expert=${cell.expert}`);
    } catch (error) {
      if (error instanceof Away || error instanceof Missing || error instanceof Unauthorized) return;
      throw error;
    }
    if (this.shown !== cell) return;
    const expert = found.experts[0];
    const facts = expert ? describe(expert, found) : ["this layer has no such expert"];
    this.#show(cell, facts);
    if (how === "keyboard") this.said.textContent = [`layer ${cell.layer}, expert ${cell.expert}`, cell.words, ...facts].join(", ");
  }

  #show(cell, facts) {
    const name = document.createElement("b");
    name.textContent = `layer ${cell.layer} · expert ${cell.expert}`;
    const lines = [cell.words, ...facts].map((text, i) => {
      const line = document.createElement("span");
      line.textContent = text;
      if (i === 0) line.className = `s${cell.state}`;
      return line;
    });
    this.tip.replaceChildren(name, ...lines);
    const wrap = this.tip.parentElement;
    const left = cell.x + cell.width + 12;
    const fits = left + this.tip.offsetWidth < wrap.clientWidth + wrap.scrollLeft;
    this.tip.style.left = `${Math.max(0, fits ? left : cell.x - this.tip.offsetWidth - 12)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(cell.y - 8, wrap.clientHeight - this.tip.offsetHeight - 2))}px`;
  }
}

function describe(expert, found) {
  const rank = expert.rank === null ? "never used" : `rank ${count(expert.rank)} of ${count(found.total)}`;
  const facts = [rank, size(expert.bytes)];
  if (expert.used_seconds_ago !== null) facts.push(`used ${ago(expert.used_seconds_ago)}`);
  if (expert.missed_seconds_ago !== null) facts.push(`missed ${ago(expert.missed_seconds_ago)}`);
  return facts;
}
