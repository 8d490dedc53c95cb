// A measure of each layer and query head, as colours: layers down, heads across.

import { empty, h } from "./dom.js";
import { count, share } from "./format.js";
import { table } from "./table.js";

const STOPS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const LOWEST = 1e-4;
const LOGARITHMIC = new Set(["retrieved", "error"]);
const LEFT = 30, BOTTOM = 20;
export const MEASURES = {
  retrieved: ["Retrieved", "share of the searched tokens that a query needs"],
  dense: ["Dense", "share of queries that the search gave up"],
  sharpness: ["Sharpness", "softmax weight of the largest token"],
  window_hits: ["Window hits", "share of queries whose largest token lies in the window"],
  error: ["Error", "bound on the 95th percentile of the relative error, by audits"],
};

const place = (measure, value) => {
  const at = LOGARITHMIC.has(measure) ? Math.log(Math.max(value, LOWEST) / LOWEST) / Math.log(1 / LOWEST) : value;
  return Math.min(1, Math.max(0, at));
};

function colour(at) {
  const step = at * (STOPS.length - 1), below = Math.min(STOPS.length - 2, Math.floor(step)), part = step - below;
  return STOPS[below].map((one, channel) => Math.round(one + (STOPS[below + 1][channel] - one) * part));
}

// The map as an element. chosen: told of a layer that was clicked.
export function heatMap(heat, chosen) {
  const { measure, values, queries } = heat;
  const known = values.flat().filter((value) => value !== null).sort((one, other) => one - other);
  if (!known.length) {
    return empty(measure === "error" ? "No answer was compared with an exact one yet." : "No query has searched this context yet.",
      "Queries show here what they need, a sample of all.");
  }
  const middle = known[Math.floor(known.length / 2)];
  const summary = `${values.length} layers, ${values[0].length} query heads; median ${share(middle)}, from ${share(known[0])} to ${share(known.at(-1))}`;
  const told = h("output", { class: "readout small" }, summary);
  const canvas = h("canvas", { class: "heat", tabindex: 0, role: "img", "data-focus": "heat",
    "aria-label": `${MEASURES[measure][0]} by layer and head. ${summary}. Arrow keys go from cell to cell, Enter explains the layer.` });
  const at = { layer: -1, head: -1 };
  const draw = () => paint(canvas, heat, at);
  const go = (layer, head) => {
    at.layer = Math.min(values.length - 1, Math.max(0, layer));
    at.head = Math.min(values[0].length - 1, Math.max(0, head));
    told.textContent = `layer ${at.layer}, head ${at.head}: ${values[at.layer][at.head] === null ? "not known" : share(values[at.layer][at.head])}`;
    draw();
  };
  const leave = () => {
    at.layer = at.head = -1;
    told.textContent = summary;
    draw();
  };
  const under = (event) => {
    const { cell } = sizes(canvas, values);
    return [Math.floor(event.offsetY / cell.height), Math.floor((event.offsetX - LEFT) / cell.width)];
  };
  canvas.addEventListener("pointermove", (event) => go(...under(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && leave());
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("click", (event) => (go(...under(event)), chosen(at.layer)));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" && at.layer >= 0) chosen(at.layer);
    if (!step) return;
    event.preventDefault();
    go(Math.max(0, at.layer) + (at.layer < 0 ? 0 : step[0]), Math.max(0, at.head) + (at.head < 0 ? 0 : step[1]));
  });
  new ResizeObserver(draw).observe(canvas);
  const counted = measure === "error" ? "audits" : "queries observed";
  return h("figure", {},
    h("div", { class: "heat-frame", style: { "--rows": String(values.length) } }, canvas),
    h("figcaption", {}, told, legend(measure), h("span", { class: "quiet small" }, `up to ${count(queries)} ${counted} a head`)),
    h("details", { "data-open": "heat" }, h("summary", { "data-focus": "heat-table" }, "As a table"), layerTable(values)));
}

// What the heads of each layer need, for those who do not see colours.
function layerTable(values) {
  const rows = values.map((row, layer) => {
    const known = row.filter((value) => value !== null).sort((one, other) => one - other);
    return { layer, known: known.length, heads: row.length, least: known[0] ?? null, median: known[Math.floor(known.length / 2)] ?? null, most: known.at(-1) ?? null };
  });
  return table("layers", [
    { title: "Layer", of: (row) => row.layer, shown: (row) => String(row.layer), text: true },
    { title: "Least", of: (row) => row.least, shown: (row) => share(row.least) },
    { title: "Median", of: (row) => row.median, shown: (row) => share(row.median) },
    { title: "Most", of: (row) => row.most, shown: (row) => share(row.most) },
    { title: "Heads known", of: (row) => row.known, shown: (row) => `${row.known} of ${row.heads}` },
  ], rows);
}

function sizes(canvas, values) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  return { width, height, cell: { width: (width - LEFT) / values[0].length, height: (height - BOTTOM) / values.length } };
}

function paint(canvas, { measure, values }, at) {
  const { width, height, cell } = sizes(canvas, values);
  if (!width) return;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
  pen.scale(scale, scale);
  pen.font = `11px ${style.fontFamily}`;
  const gap = Math.min(cell.width, cell.height) > 6 ? 1 : 0;
  values.forEach((row, layer) => row.forEach((value, head) => {
    const x = LEFT + head * cell.width, y = layer * cell.height, place_ = value === null ? null : place(measure, value);
    pen.fillStyle = place_ === null ? style.getPropertyValue("--line") : `rgb(${colour(place_).join()})`;
    pen.fillRect(x, y, cell.width - gap, cell.height - gap);
    if (place_ !== null && cell.width >= 46 && cell.height >= 18) {
      pen.fillStyle = place_ > 0.55 ? "#111" : "#fff";
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(share(value), x + cell.width / 2, y + cell.height / 2);
    }
  }));
  pen.fillStyle = style.color;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const down = stepOf(values.length, cell.height, 14), across = stepOf(values[0].length, cell.width, 26);
  for (let layer = 0; layer < values.length; layer += down) pen.fillText(String(layer), LEFT - 6, (layer + 0.5) * cell.height);
  pen.textAlign = "center";
  for (let head = 0; head < values[0].length; head += across) pen.fillText(String(head), LEFT + (head + 0.5) * cell.width, height - BOTTOM / 2);
  if (at.layer >= 0) {
    pen.strokeStyle = style.color;
    pen.lineWidth = 2;
    pen.strokeRect(LEFT + at.head * cell.width, at.layer * cell.height + 1, cell.width - gap, cell.height - gap - 1);
  }
}

// Every how many-th number has room, of those that people count in.
const stepOf = (numbers, size, room) => [1, 2, 4, 5, 8, 10, 16, 20, 32, 64].find((step) => step * size >= room) ?? numbers;

function legend(measure) {
  const canvas = h("canvas", { class: "legend", width: 120, height: 8, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  for (let x = 0; x < 120; x++) {
    pen.fillStyle = `rgb(${colour(x / 119).join()})`;
    pen.fillRect(x, 0, 1, 8);
  }
  return h("span", { class: "scale small quiet" }, LOGARITHMIC.has(measure) ? "≤ 0.01 %" : "0 %", canvas, "100 %");
}
