// A plan as a tree: the merge, the parts below it, and below these how each is read.

import { h } from "./dom.js";
import { bytes, count, plural, seconds, share } from "./format.js";

const PARTS_MAX = 40;

export function planTree(plan) {
  const parts = new Map();
  for (const access of plan.accesses) parts.set(access.part, [...(parts.get(access.part) ?? []), access]);
  const longest = Math.max(...plan.accesses.map((access) => (access.actual ?? access.estimate).seconds), 1e-12);
  const shown = [...parts].slice(0, PARTS_MAX), left = parts.size - shown.length;
  const who = plan.chosen ? "chosen by the optimizer" : "asked for";
  return [
    plan.outcome && outcome(plan),
    h("ul", { class: "tree" }, h("li", {},
      node(`Merge on layer ${plan.layer}`, plan, null),
      h("p", { class: "quiet small" }, `Retrieve: ${plan.retrieval}, ${who}`),
      plan.notes.map((note) => h("p", { class: "quiet small" }, note)),
      h("ul", {}, shown.map(([part, accesses]) => partNode(part, accesses, longest)),
        left > 0 && h("li", { class: "quiet" }, `${plural(left, "more part")}, in the text below`)))),
    plan.wishes.length > 0 && h("p", { class: "quiet small" }, "Would be used if they stood: ",
      [...new Set(plan.wishes.map((wish) => `${wish.index} on ${wish.part}`))].join(", ")),
    h("details", { "data-open": "plan-text" }, h("summary", { "data-focus": "plan-text" }, "As text"), h("pre", { tabindex: 0 }, plan.text)),
  ];
}

function outcome(plan) {
  const figure = (value, title, hint) => h("div", { title: hint }, h("b", {}, value), h("span", { class: "quiet small" }, title));
  const { missed_true: missed, output_error: error, planning_seconds: planning } = plan.outcome;
  return h("div", { class: "outcome" },
    figure(seconds(plan.actual.seconds), "carried out in"),
    figure(seconds(planning), "planned in"),
    figure(share(missed), "of the mass missed", "the true share of the softmax mass, by exact attention"),
    figure(share(error), "output error", "relative to exact attention"));
}

function partNode(part, accesses, longest) {
  if (accesses.length === 1) return h("li", {}, accessNode(accesses[0], part, longest));
  const sum = (pick) => accesses.reduce((total, access) => total + pick(access), 0);
  return h("li", {},
    h("p", { class: "node" }, h("b", {}, part), h("span", { class: "quiet" }, ` ${plural(accesses.length, "way")} · ${plural(sum((access) => access.end - access.begin), "token")}`)),
    h("ul", {}, accesses.map((access) => h("li", {}, accessNode(access, null, longest)))));
}

function accessNode(access, part, longest) {
  const way = access.index === null ? "Exact scan" : `Search of ${access.index}`;
  const where = `${part ? ` on ${part}` : ""}${access.rule === "window" ? ", window" : ""}`;
  const facts = [
    access.actual?.left_heads > 0 && `gave up on ${plural(access.actual.left_heads, "KV head")}, read whole`,
    access.retrieval && `needs ${access.retrieval}`, access.heads && `KV heads ${access.heads}`, access.format && `held as ${access.format}`,
    `in ${access.tier}`, `its tokens ${count(access.begin)} to ${count(access.end)}`,
    access.rule !== "window" && `rule ${access.rule}${access.reason ? `: ${access.reason}` : ""}`,
  ].filter(Boolean);
  return [
    node(way + where, access, longest),
    h("p", { class: "quiet small" }, facts.join(" · ")),
    access.refusals.length > 0 && h("details", { class: "small", "data-open": `why:${access.part}:${access.begin}:${access.heads}` },
      h("summary", {}, `${plural(access.refusals.length, "way")} passed over`),
      h("ul", { class: "plain" }, access.refusals.map((refusal) => h("li", {}, h("code", {}, refusal.rule), ` ${refusal.reason}`)))),
  ];
}

function node(title, { estimate, actual }, longest) {
  const cost = actual ?? estimate;
  const expected = `expected ${seconds(estimate.seconds)}, ${plural(estimate.tokens, "token")}, ${bytes(estimate.nbytes)}`;
  const scanned = actual && Math.round(actual.scanned) !== Math.round(actual.tokens) ? ` of ${count(actual.scanned)} looked at` : "";
  return h("div", { class: "node" },
    h("b", {}, title),
    h("span", { class: "costs", title: expected }, `${seconds(cost.seconds)} · ${count(cost.tokens)} tokens${scanned} · ${bytes(cost.nbytes)}`,
      actual ? h("span", { class: "quiet" }, ` · expected ${seconds(estimate.seconds)}`) : h("span", { class: "quiet" }, " expected")),
    longest !== null && h("span", { class: "time-bar", "aria-hidden": "true" }, h("i", { style: { width: `${Math.max(1, (100 * cost.seconds) / longest)}%` } })));
}
