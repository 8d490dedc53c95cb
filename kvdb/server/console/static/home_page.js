// The first page: what memory holds, who is at work, and what is stored.

import { empty, h } from "./dom.js";
import { ago, bytes, count, plural, seconds, share } from "./format.js";
import { bar } from "./segments.js";

const TIERS = { cpu: "Main memory", disk: "Disk", gpu: "GPU" };
const POINTS = 60;
const history = new Map();

// Note how full the tiers are now, for the lines beside them.
export function note(tiers) {
  for (const tier of tiers) history.set(tier.name, [...(history.get(tier.name) ?? []), tier.used].slice(-POINTS));
}

export function tierCards(tiers) {
  if (!tiers.length) return empty("Nothing is stored yet.", "Tiers show here with their first block.");
  return tiers.map(tierCard);
}

function tierCard(tier) {
  const top = tier.limit ?? Math.max(tier.held, tier.used, 1);
  const part = Math.min(1, tier.used / top);
  const title = TIERS[tier.name] ?? tier.name;
  const of = tier.limit === null ? `of ${bytes(top)} taken` : `of ${bytes(tier.limit)}`;
  const level = tier.limit === null ? "open" : part > 0.9 ? "full" : "";
  return h("div", { class: "tier" },
    h("div", { class: "tier-top" }, h("h3", {}, title), spark(history.get(tier.name) ?? [], top)),
    h("p", { class: "figure", title: `${count(tier.used)} bytes` }, bytes(tier.used), h("span", { class: "quiet" }, ` ${of}`)),
    h("div", { class: `meter ${level}`, role: "meter", "aria-label": `${title} in use`, "aria-valuemin": 0, "aria-valuemax": top,
      "aria-valuenow": tier.used, "aria-valuetext": `${bytes(tier.used)} ${of}` }, h("i", { style: { width: `${part * 100}%` } })),
    h("p", { class: "quiet small" }, plural(tier.blocks, "block"), tier.limit === null ? " · no limit" : ` · ${share(part)} in use · ${bytes(tier.held)} taken`));
}

function spark(values, top) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const points = values.map((value, at) => `${100 - (values.length - 1 - at) * (100 / (POINTS - 1))},${22 - 20 * Math.min(1, value / top)}`);
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", points.length === 1 ? "" : points.join(" ")); // one point is no line
  svg.append(line);
  return svg;
}

export function sessionTable({ sessions, total }) {
  if (!sessions.length) return empty("No session is open.", "One shows here as long as an engine decodes on it.");
  const left = total - sessions.length;
  return [
    h("table", { class: "wide sessions" },
      h("thead", {}, h("tr", {}, ["Session", "Tokens", "Reused", "Queries", "Attended", "Kernels", "Mostly by"].map(
        (title, at) => h("th", { scope: "col", class: at && at < 6 ? "number" : "" }, title)))),
      h("tbody", {}, sessions.map(sessionRow))),
    left > 0 && h("p", { class: "quiet small" }, `and ${plural(left, "older session")}`),
  ];
}

function sessionRow(session) {
  const [rule] = Object.entries(session.rules).sort((one, other) => other[1] - one[1])[0] ?? ["–"];
  const cell = (label, ...content) => h("td", { class: "number", "data-label": label }, ...content);
  return h("tr", {},
    h("th", { scope: "row" }, session.label ? h("a", { href: `#/session/${encodeURIComponent(session.label)}`, "data-focus": `s:${session.label}` }, session.label)
      : h("span", { class: "quiet" }, "no label"),
      h("span", { class: "under quiet" }, `${session.model.name} · ${session.model.layers} layers`)),
    cell("Tokens", count(session.tokens)),
    cell("Reused", share(session.tokens ? session.reused / session.tokens : 0)),
    cell("Queries", count(session.queries)),
    cell("Attended", h("span", { title: "of the tokens that were looked at" }, share(session.retrieved))),
    cell("Kernels", session.queries ? seconds(session.seconds) : "–"),
    h("td", { "data-label": "Mostly by" }, h("code", {}, rule)));
}

export function contextTable({ contexts, prefix, paged }) {
  if (!contexts.length) {
    if (prefix) return empty("No name begins so.", "Names are compared letter by letter.");
    if (paged) return empty("There are no more contexts.");
    return empty("No context is stored yet.", "import_context and session.store put one here; kvdb demo shows how.");
  }
  const most = Math.max(...contexts.map((context) => context.tokens));
  return h("table", { class: "wide contexts" },
    h("thead", {}, h("tr", {},
      h("th", { scope: "col" }, "Name"), h("th", { scope: "col" }, "Segments"), h("th", { scope: "col", class: "number" }, "Tokens"),
      h("th", { scope: "col", class: "number" }, "Bytes"), h("th", { scope: "col", class: "number" }, "Uses"),
      h("th", { scope: "col", class: "number" }, "Last used"))),
    h("tbody", {}, contexts.map((context) => contextRow(context, most))));
}

function contextRow(context, most) {
  const marks = [context.kind !== "prefix" && context.kind, context.pinned && "pinned", context.format, !context.resident && "on disk"];
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: `#/context/${encodeURIComponent(context.name)}`, "data-focus": `c:${context.name}` },
      context.name), marks.filter(Boolean).map((mark) => h("span", { class: "mark" }, mark))),
    h("td", { class: "segments-cell" }, h("div", { style: { width: `${Math.max(2, (100 * context.tokens) / most)}%` } }, bar(context))),
    h("td", { class: "number", "data-label": "Tokens" }, count(context.tokens)),
    h("td", { class: "number", "data-label": "Bytes", title: `${count(context.nbytes)} bytes` }, bytes(context.nbytes)),
    h("td", { class: "number", "data-label": "Uses" }, count(context.uses)),
    h("td", { class: "number", "data-label": "Last used" }, h("time", { "data-at": context.used }, ago(context.used))));
}
