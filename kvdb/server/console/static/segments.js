// The segments of a context as a bar: as wide as they have tokens, and one colour wherever a segment is seen.

import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { table } from "./table.js";

const GOLDEN_ANGLE = 137.508;
const TOLD_MAX = 12;
const ROWS_MAX = 200;

const colour = (segment) => ({ "--hue": String((segment * GOLDEN_ANGLE) % 360) });

const told = (view) => `segment ${view.segment}: ${plural(view.visible, "token")}` +
  (view.visible < view.stored ? ` of ${count(view.stored)}` : "") + (view.resident ? "" : ", on disk");

export function bar(context, labelled = false) {
  const views = context.views;
  const left = context.segments - views.length;
  const said = views.slice(0, TOLD_MAX).map(told).join("; ") + (context.segments > TOLD_MAX ? `; ${count(context.segments - TOLD_MAX)} more` : "");
  return h("div", { class: `bar ${labelled ? "tall" : ""}`, role: "img", "aria-label": said },
    views.map((view) => h("i", {
      class: [view.resident ? "" : "away", view.visible < view.stored ? "cut" : ""].join(" "), title: told(view),
      style: { ...colour(view.segment), "flex-grow": String(view.visible) },
    }, labelled && h("span", {}, `#${view.segment}`))),
    left > 0 && h("i", { class: "more", title: `${count(left)} more segments` }));
}

export function segmentTable(context) {
  const rows = context.views.slice(0, ROWS_MAX);
  const left = context.segments - rows.length;
  return [
    table("segments", [
      { title: "Segment", of: (view) => view.segment, text: true,
        shown: (view) => [h("i", { class: "swatch", style: colour(view.segment), "aria-hidden": "true" }), `#${view.segment}`] },
      { title: "From", of: (view) => view.begin, shown: (view) => count(view.begin) },
      { title: "Sees", of: (view) => view.visible, shown: (view) => count(view.visible) },
      { title: "Of", of: (view) => view.stored, shown: (view) => count(view.stored) },
      { title: "Bytes", of: (view) => view.nbytes, shown: (view) => bytes(view.nbytes), hint: (view) => `${count(view.nbytes)} bytes` },
      { title: "Held by", of: (view) => view.holders, shown: (view) => count(view.holders), hint: () => "contexts and sessions" },
      { title: "Where", text: true, of: (view) => (view.resident ? "memory" : "disk") + (view.format && ` · ${view.format}`) +
        (view.shift ? ` · moved by ${count(view.shift)}` : "") },
    ], rows),
    left > 0 && h("p", { class: "quiet small" }, `and ${plural(left, "more segment")}`),
  ];
}
