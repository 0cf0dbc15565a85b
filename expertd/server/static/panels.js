// The words and bars of the page: state, verdict, request, memory, profiles. Each is written only when it says something new.

import { count, percent, seconds, size } from "./format.js";

const KINDS = {
  dense_locked: "dense, locked", dense: "dense, not locked", pinned: "experts, pinned", resident: "experts, resident",
  kv: "KV cache", other: "everything else", free: "free",
};

const $ = (id) => document.getElementById(id);

/** Sets text where it differs, so that a screen reader is told of changes alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function showState(now, model) {
  const pill = $("state");
  pill.dataset.state = now.state;
  say(pill, now.state);
  if (model) {
    say($("model"), `${model.id} · ${model.description} · ${size(model.nbytes)}`);
    document.title = `${model.id} · expertd`;
  }
  const { what, done, total } = now.progress;
  const waiting = now.state === "loading" || now.state === "warming";
  track($("progress"), waiting && total ? done / total : null);
  if (waiting && total) $("progress").setAttribute("aria-label", `${now.state}: ${what}`);
}

export function showVerdict(now) {
  const { verdict, last_busy: before } = now;
  if (!verdict) return;
  $("verdict").dataset.cause = verdict.cause;
  say($("cause"), verdict.cause.replace("_", "-"));
  $("thrashing").hidden = !verdict.thrashing;
  say($("sentence"), now.failure || verdict.sentence);
  say($("advice"), verdict.advice);
  const idle = (verdict.cause === "idle" || verdict.cause === "starting") && before;
  $("before").hidden = !idle;
  if (idle) say($("before"), `Before: ${before.sentence} ${before.advice}`);
}

export function showRequest(now) {
  const [running, ...waiting] = now.slots;
  say($("queue"), waiting.length ? `${waiting.length} waiting` : "nobody waits");
  const facts = [];
  let share = null;
  if (!running.is_processing) {
    say($("request-what"), "Idle");
  } else {
    const { n_prompt_tokens: all, n_prompt_done: done, n_decoded: written, running_seconds: spent } = running;
    say($("request-what"), written ? `Writing: ${count(written)} tokens` : `Reading: ${count(done)} of ${count(all)} tokens`);
    share = written ? null : done / all;
    facts.push(["Prompt", `${count(all)} tokens`], ["Running", seconds(spent)]);
    if (running.waiting_seconds >= 0.1) facts.push(["Waited", seconds(running.waiting_seconds)]);
    facts.push(["Request", running.request_id]);
  }
  track($("request-track"), share);
  list($("request-facts"), facts);
}

export function showTotals({ cache }) {
  $("totals").hidden = !cache.steering;
  if (!cache.steering) return;
  list($("totals-facts"), [
    ["Hits", `${count(cache.hits)} of ${count(cache.requests)} (${percent(cache.hit_ratio)})`],
    ["Evictions", count(cache.evictions)],
    ["Fetched", size(cache.bytes_read)],
    ["Policy", cache.policy],
  ]);
}

export function showMemory(now) {
  const { memory, cache } = now;
  if (!memory?.limit) return;
  say($("memory-limit"), `of ${size(memory.limit)}`);
  const kinds = Object.keys(KINDS);
  bar($("memory-bar"), kinds.map((kind) => [kind, memory[kind]]), memory.limit);
  $("memory-bar").setAttribute("aria-label", `Memory by kind: ${kinds.map((k) => `${KINDS[k]} ${size(memory[k])}`).join(", ")}`);
  rows($("memory-kinds").tBodies[0], kinds, (kind) => [KINDS[kind], size(memory[kind])]);
  const total = memory.experts_total;
  const steering = cache.steering && total > 0;
  $("experts-bar").hidden = $("experts-words").hidden = !steering;
  if (!steering) return;
  const { experts, resident_bytes: resident, pinned_bytes: pinned, budget_bytes: budget } = cache;
  const words = `${count(experts.resident)} of ${count(experts.total)} experts: ${size(resident)} of ${size(total)}, budget ${size(budget)}`;
  bar($("experts-bar"), [["pinned", pinned], ["resident", resident - pinned]], total, budget);
  $("experts-bar").setAttribute("aria-label", `Experts in memory: ${words}`);
  say($("experts-words"), words);
}

/** The table of kinds, with a swatch before each name. */
function rows(body, kinds, texts) {
  if (body.rows.length !== kinds.length) {
    body.replaceChildren();
    for (const kind of kinds) {
      const row = body.insertRow();
      const swatch = document.createElement("span");
      swatch.className = `swatch k-${kind}`;
      row.insertCell().append(swatch, document.createElement("span"));
      row.insertCell();
    }
  }
  kinds.forEach((kind, i) => {
    const [name, value] = texts(kind);
    say(body.rows[i].cells[0].lastChild, name);
    say(body.rows[i].cells[1], value);
  });
}

function bar(box, parts, total, goal) {
  while (box.children.length < parts.length + (goal === undefined ? 0 : 1)) box.append(document.createElement("i"));
  parts.forEach(([kind, value], i) => {
    const piece = box.children[i];
    piece.className = `k-${kind}`;
    piece.style.width = `${(100 * Math.max(0, value)) / total}%`;
    piece.style.minWidth = value > 0 && kind !== "free" ? "2px" : "0";
  });
  if (goal === undefined) return;
  const mark = box.children[parts.length];
  mark.className = "goal";
  mark.style.left = `${Math.min(99.5, (100 * goal) / total)}%`;
}

function list(box, facts) {
  while (box.children.length > 2 * facts.length) box.lastChild.remove();
  facts.forEach(([name, value], i) => {
    if (!box.children[2 * i]) box.append(document.createElement("dt"), document.createElement("dd"));
    say(box.children[2 * i], name);
    say(box.children[2 * i + 1], value);
  });
}

function track(node, share) {
  node.hidden = share === null;
  if (share === null) return;
  const whole = Math.round(100 * share);
  node.setAttribute("aria-valuenow", String(whole));
  node.firstElementChild.style.width = `${whole}%`;
}

/** `found` is null where the daemon keeps none. */
export function showProfiles(found) {
  const profiles = Array.isArray(found) ? found : (found?.profiles ?? []);
  $("profiles").hidden = profiles.length === 0;
  say($("profiles-count"), String(profiles.length));
  $("profiles-list").replaceChildren(...profiles.map(profileItem));
}

function profileItem(profile) {
  const item = document.createElement("li");
  const name = document.createElement("b");
  const facts = document.createElement("span");
  const known = [profile.default && "learns now", profile.experts && `${count(profile.experts)} experts`,
    profile.tokens && `${count(Math.round(profile.tokens))} tokens`];
  name.textContent = profile.name ?? String(profile);
  facts.className = "muted";
  facts.textContent = known.filter(Boolean).join(" · ");
  item.append(name, facts);
  return item;
}

export function showDaemon(now, model) {
  if (now.started_at) say($("daemon-up"), `up ${seconds(now.now - now.started_at)}`);
  say($("daemon"), [model ? `context ${count(model.n_ctx)}` : "", now.cache.why].filter(Boolean).join(" · "));
}
