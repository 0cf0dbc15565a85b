// The same as text: the hottest experts, the layers, the last points. Filled only while the tables are shown.

import { ago, count, percent, size } from "./format.js";

const HOTTEST = 24;

/** Asks for what the map does not know, and fills all three. */
export async function fillTables(api, map, charts) {
  const [hottest, cache] = await Promise.all([api.json(`expertd/experts?limit=${HOTTEST}`), api.json("expertd/cache")]);
  fill("hottest", hottest.experts.map((e) => [
    e.rank ?? "–", `layer ${e.layer}, expert ${e.expert}`, e.state === "missed" ? "just missed" : e.state, size(e.bytes),
    ago(e.used_seconds_ago), ago(e.missed_seconds_ago),
  ]));
  fill("layers", cache.layers.map((layer, row) => [
    layer.layer, `${layer.resident} of ${layer.experts}`, layer.pinned ?? 0, map.layers.length ? map.counts(row)[3] : 0,
    percent(layer.requests ? layer.hit_ratio : null), count(layer.requests),
  ]));
  fillPoints(charts);
}

function fillPoints(charts) {
  const [heads, rows] = charts.table();
  const head = document.getElementById("points").tHead;
  if (!head.rows.length) {
    const row = head.insertRow();
    for (const text of heads) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = text;
      row.append(cell);
    }
  }
  fill("points", rows);
}

/** Rewrites the cells that differ; the first of a row is its head. */
function fill(id, rows) {
  const body = document.getElementById(id).tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? newRow(body, cells.length);
    cells.forEach((value, j) => {
      const text = String(value);
      if (row.children[j].textContent !== text) row.children[j].textContent = text;
    });
  });
}

function newRow(body, n) {
  const row = body.insertRow();
  const head = document.createElement("th");
  head.scope = "row";
  row.append(head);
  for (let i = 1; i < n; i++) row.insertCell();
  return row;
}
