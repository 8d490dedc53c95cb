// The first page: what memory holds, who is at work, and what is stored.

import { empty, h } from "./dom.js";
import { age, ago, bytes, count, plural, seconds, share } from "./format.js";
import { bar } from "./segments.js";
import { spark } from "./spark.js";
import { table } from "./table.js";

const TIERS = { cpu: "Main memory", disk: "Disk", gpu: "GPU" };
const POINTS = 60;
const history = new Map();

// Note how full the tiers are now, for the lines beside them.
export function note(tiers) {
  for (const tier of tiers) history.set(tier.name, [...(history.get(tier.name) ?? []), tier.used].slice(-POINTS));
}

export function tierCards(tiers) {
  const held = tiers.filter((tier) => tier.used || tier.limit !== null);
  return held.length ? held.map(tierCard) : empty("Nothing is stored yet.", "Tiers show here with their first block.");
}

// A tier by the bytes of its blocks that hold something. Only one that has a limit can be full.
function tierCard(tier) {
  const values = history.get(tier.name) ?? [], limited = tier.limit !== null;
  const part = limited ? Math.min(1, tier.used / tier.limit) : 0;
  const title = TIERS[tier.name] ?? tier.name, of = limited ? ` of ${bytes(tier.limit)}` : "";
  return h("div", { class: "tier" },
    h("div", { class: "tier-top" }, h("h3", {}, title), spark(values, tier.limit ?? Math.max(...values, 1))),
    h("p", { class: "figure", title: `${count(tier.used)} bytes` }, bytes(tier.used), h("span", { class: "quiet" }, of)),
    limited && h("div", { class: part > 0.9 ? "meter full" : "meter", role: "meter", "aria-label": `${title} in use`, "aria-valuemin": 0,
      "aria-valuemax": tier.limit, "aria-valuenow": tier.used, "aria-valuetext": bytes(tier.used) + of },
    tier.used > 0 && h("i", { style: { width: `${part * 100}%` } })),
    limited && h("p", { class: "quiet small" }, `${share(part)} in use`));
}

const SESSION = [
  { title: "Session", of: (session) => session.label || session.id, shown: sessionName, text: true },
  { title: "Tenant", of: (session) => session.tenant || null, shown: (session) => session.tenant || "–", text: true },
  { title: "Age", of: (session) => -session.opened, shown: (session) => h("time", { "data-since": session.opened }, age(session.opened)) },
  { title: "Tokens", of: (session) => session.tokens, shown: (session) => count(session.tokens) },
  { title: "Reused", of: reused, shown: (session) => share(reused(session)) },
  { title: "Queries", of: (session) => session.queries, shown: (session) => count(session.queries) },
  { title: "Attended", of: (session) => session.retrieved, shown: (session) => share(session.retrieved), hint: () => "of the tokens that were looked at" },
  { title: "Kernels", of: (session) => (session.queries ? session.seconds : null), shown: (session) => (session.queries ? seconds(session.seconds) : "–") },
  { title: "Mostly by", of: rule, shown: (session) => h("code", {}, rule(session) ?? "–"), text: true },
];

function sessionName({ id, label, model }) {
  return [
    h("a", { href: `#/session/${encodeURIComponent(id)}`, "data-focus": `s:${id}` }, label || id),
    h("span", { class: "under quiet" }, label && `${id} · `, `${model.name} · ${model.layers} layers`),
  ];
}

function reused(session) {
  return session.tokens ? session.reused / session.tokens : 0;
}

function rule(session) {
  return Object.entries(session.rules).sort((one, other) => other[1] - one[1])[0]?.[0] ?? null;
}

export function sessionTable({ sessions, total }) {
  if (!sessions.length) return empty("No session is open.", "One shows here as long as an engine decodes on it.");
  const left = total - sessions.length;
  return [table("sessions", SESSION, sessions), left > 0 && h("p", { class: "quiet small" }, `and ${plural(left, "older session")}`)];
}

export function contextTable({ contexts, prefix, paged }) {
  if (!contexts.length) {
    if (prefix) return empty("No name begins so.", "Names are compared letter by letter.");
    if (paged) return empty("There are no more contexts.");
    return empty("No context is stored yet.", "import_context and session.store put one here; kvdb demo shows how.");
  }
  const most = Math.max(...contexts.map((context) => context.tokens));
  return table("contexts", [
    { title: "Name", of: (context) => context.name, shown: contextName, text: true },
    { title: "Segments", of: (context) => context.segments, text: true, class: "segments-cell",
      shown: (context) => h("div", { style: { width: `${Math.max(2, (100 * context.tokens) / most)}%` } }, bar(context)) },
    { title: "Tokens", of: (context) => context.tokens, shown: (context) => count(context.tokens) },
    { title: "Bytes", of: (context) => context.nbytes, shown: (context) => bytes(context.nbytes), hint: (context) => `${count(context.nbytes)} bytes` },
    { title: "Uses", of: (context) => context.uses, shown: (context) => count(context.uses) },
    { title: "Last used", of: (context) => -context.used, shown: (context) => h("time", { "data-at": context.used }, ago(context.used)) },
  ], contexts);
}

function contextName(context) {
  const marks = [context.kind !== "prefix" && context.kind, context.pinned && "pinned", context.format, !context.resident && "on disk"];
  return [
    h("a", { href: `#/context/${encodeURIComponent(context.name)}`, "data-focus": `c:${context.name}` }, context.name),
    marks.filter(Boolean).map((mark) => h("span", { class: "mark" }, mark)),
  ];
}
