// The segments of a context as a bar: as wide as they have tokens, and one colour wherever a segment is seen.

import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";

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
  const titles = ["Segment", "From", "Sees", "Of", "Bytes", "Held by", "Where"];
  return [
    h("table", { class: "wide" },
      h("thead", {}, h("tr", {}, titles.map((title, at) => h("th", { scope: "col", class: at && at < 6 ? "number" : "" }, title)))),
      h("tbody", {}, rows.map((view) => h("tr", {},
        h("th", { scope: "row" }, h("i", { class: "swatch", style: colour(view.segment), "aria-hidden": "true" }), `#${view.segment}`),
        h("td", { class: "number", "data-label": "From" }, count(view.begin)),
        h("td", { class: "number", "data-label": "Sees" }, count(view.visible)),
        h("td", { class: "number", "data-label": "Of" }, count(view.stored)),
        h("td", { class: "number", "data-label": "Bytes", title: `${count(view.nbytes)} bytes` }, bytes(view.nbytes)),
        h("td", { class: "number", "data-label": "Held by", title: "contexts and sessions" }, count(view.holders)),
        h("td", { "data-label": "Where" }, view.resident ? "memory" : "disk", view.format && ` · ${view.format}`,
          view.shift ? ` · moved by ${count(view.shift)}` : ""))))),
    left > 0 && h("p", { class: "quiet small" }, `and ${plural(left, "more segment")}`),
  ];
}
