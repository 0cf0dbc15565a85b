// The dashboard: looks at the daemon once a second while somebody looks at the page, and shows what it says.
//
// 1. One small JSON for all figures, and one byte an expert for the map, which is not sent again while nothing changed.
// 2. A hidden tab asks for nothing; an idle daemon is asked every other second.
// 3. No answer: say so, keep what is shown, ask again at growing intervals. Another `run`: the daemon was started again.
// 4. A daemon that wants an API key: ask for it, go on.

import { Api, Away, Missing, Unauthorized, askForKey } from "./api.js";
import { Charts } from "./charts.js";
import { clock } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { Inspector } from "./inspector.js";
import { say, showDaemon, showMemory, showProfiles, showRequest, showState, showTotals, showVerdict } from "./panels.js";
import { fillTables } from "./tables.js";
import { startTheme } from "./theme.js";

const BUSY_MS = 1000;
const IDLE_MS = 2000;
const AWAY_MS = [1000, 2000, 4000, 5000];
const PROFILES_MS = 30_000;
const RESTART_SAID_MS = 20_000;

const $ = (id) => document.getElementById(id);

class Dashboard {
  constructor() {
    this.api = new Api();
    this.inspector = new Inspector(this.api);
    this.map = new HeatMap($("map"), (cell, how) => this.inspector.focus(cell, how));
    this.charts = new Charts($("charts"));
    this.run = null;
    this.last = -1;
    this.tag = null;
    this.model = null;
    this.failures = 0;
    this.awaySince = 0;
    this.saidUntil = 0;
    this.profilesAt = -Infinity;
    this.timer = 0;
    this.looking = false;
    this.tables = false;
  }

  start() {
    startTheme(() => {
      this.map.recolour();
      this.charts.recolour();
    });
    $("as-charts").addEventListener("click", () => this.#view(false));
    $("as-tables").addEventListener("click", () => this.#view(true));
    for (const button of $("span").children) {
      button.addEventListener("click", () => {
        press([...$("span").children], button);
        this.charts.show(Number(button.dataset.minutes));
      });
    }
    document.addEventListener("visibilitychange", () => this.#later(document.hidden ? null : 0));
    this.#later(0);
  }

  #later(ms) {
    clearTimeout(this.timer);
    if (ms !== null && !document.hidden) this.timer = setTimeout(() => this.#look(), ms);
  }

  async #look() {
    if (this.looking) return;
    this.looking = true;
    let wait = IDLE_MS;
    try {
      const changed = await this.#once();
      this.#here();
      wait = changed ? BUSY_MS : IDLE_MS;
    } catch (error) {
      if (error instanceof Unauthorized) wait = await this.#key();
      else if (error instanceof Away || error instanceof Missing) wait = this.#away();
      else throw error;
    } finally {
      this.looking = false;
      this.#later(wait);
    }
  }

  /** One look. True where something goes on. */
  async #once() {
    const since = this.last >= 0 ? `?since=${this.last}` : "";
    let now = await this.api.json(`expertd/series${since}`);
    const restarted = this.run !== null && now.run !== this.run;
    if (restarted) now = await this.api.json("expertd/series");
    if (now.run !== this.run) this.#another(now, restarted);
    if (!this.model && now.state !== "loading") this.model = (await this.api.json("expertd/status")).model;
    this.last = now.last ?? -1;
    this.#show(now, restarted);
    const cells = await this.#cells(now);
    if (this.tables) await fillTables(this.api, this.map, this.charts);
    await this.#profiles(now);
    return cells || now.state !== "ready" || now.slots.some((slot) => slot.is_processing);
  }

  #another(now, restarted) {
    this.run = now.run;
    this.model = this.tag = null;
    this.profilesAt = -Infinity;
    if (restarted) this.#tell(`The daemon was started again at ${clock(now.started_at)}.`, "good", RESTART_SAID_MS);
  }

  #show(now, restarted) {
    showState(now, this.model);
    showVerdict(now);
    showRequest(now);
    showMemory(now);
    showTotals(now);
    showDaemon(now, this.model);
    this.charts.add(now.columns ?? ["at"], now.points ?? [], now.seconds, restarted);
  }

  /** The map. True where it changed. */
  async #cells(now) {
    const steering = now.cache.steering;
    $("map-charts").querySelector(".map-wrap").hidden = $("legend").hidden = !steering;
    $("map-empty").hidden = steering;
    if (!steering) {
      say($("map-empty"), now.state === "ready" ? `There is no map, since nobody looks at the router (${now.cache.why}).` : "The map comes with the model.");
      say($("map-counts"), "");
      return false;
    }
    const found = await this.api.bytes("expertd/heatmap", this.tag);
    if (found === null) return false;
    this.tag = found.tag;
    const layers = (found.headers.get("x-expertd-layers") || "").split(",").map(Number);
    this.map.show(found.body, layers, Number(found.headers.get("x-expertd-experts")));
    const { resident, pinned } = now.cache.experts;
    const missed = this.map.counts()[3];
    const words = [`${layers.length} layers × ${this.map.experts}`, `${resident} resident`];
    if (pinned) words.push(`${pinned} pinned`);
    if (missed) words.push(`${missed} just missed`);
    say($("map-counts"), words.join(" · "));
    return true;
  }

  /** A daemon that steers nothing keeps none, and says so by an error. */
  async #profiles(now) {
    if (now.state !== "ready" || !now.cache.steering || performance.now() - this.profilesAt < PROFILES_MS) return;
    this.profilesAt = performance.now();
    try {
      showProfiles(await this.api.json("expertd/profiles"));
    } catch (error) {
      if (!(error instanceof Missing || error instanceof Away)) throw error;
      showProfiles(null);
    }
  }

  #view(tables) {
    this.tables = tables;
    press([$("as-charts"), $("as-tables")], tables ? $("as-tables") : $("as-charts"));
    $("map-charts").hidden = $("charts").hidden = $("span").hidden = tables;
    $("map-tables").hidden = $("series-tables").hidden = !tables;
    if (!tables) this.charts.draw();
    this.#later(0);
  }

  /** Case 3. */
  #away() {
    this.failures++;
    if (!this.awaySince) this.awaySince = Date.now() / 1000;
    this.#tell(`No answer from the daemon since ${clock(this.awaySince)}. Asking again.`, "bad");
    $("state").dataset.state = "away";
    say($("state"), "away");
    $("verdict").dataset.cause = "away";
    return AWAY_MS[Math.min(this.failures, AWAY_MS.length) - 1];
  }

  #here() {
    const back = this.awaySince > 0;
    this.failures = this.awaySince = 0;
    if (back && Date.now() > this.saidUntil) this.#tell("The daemon answers again.", "good", RESTART_SAID_MS);
    else if (Date.now() > this.saidUntil) $("connection").hidden = true;
  }

  #tell(text, kind, forMs = 0) {
    this.saidUntil = forMs ? Date.now() + forMs : 0;
    $("connection").dataset.kind = kind;
    $("connection").hidden = false;
    say($("connection"), text);
  }

  /** Case 4. */
  async #key() {
    await askForKey(this.api, this.api.key !== "");
    return 0;
  }
}

function press(buttons, pressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
}

const dashboard = new Dashboard();
dashboard.start();
