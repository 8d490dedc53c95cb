// What all clients ask for: calls in a second, how long they take, and how they fail. The server counts, and this subtracts.

import { h } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { spark } from "./spark.js";

const WINDOW_S = 120;
const KINDS = { steps: "Decode steps", calls: "Other calls" };
const NOTHING = { codes: {}, latencies: { steps: [], calls: [] } };
let looks = []; // { at, codes, latencies } of the last WINDOW_S

const total = (look, kind) => look.latencies[kind].at(-1)?.[1] ?? 0;
const all = (look) => total(look, "steps") + total(look, "calls");
const failures = (look) => Object.entries(look.codes).reduce((sum, [code, number]) => sum + (code === "OK" ? 0 : number), 0);

// Note what was counted until `at`, in seconds.
export function noteCalls(told, at) {
  if (looks.length && all(told) < all(looks.at(-1))) looks = []; // the server was started anew
  looks = [...looks, { ...told, at }].filter((look) => at - look.at <= WINDOW_S);
}

export function sinceWhen() {
  return looks.length < 2 ? "since the server started" : `in the last ${Math.round(looks.at(-1).at - looks[0].at)} s`;
}

export function callPanels() {
  const last = looks.at(-1), first = looks.length > 1 ? looks[0] : NOTHING, spent = last.at - first.at; // NaN at the first look
  const aSecond = (of) => (spent > 0 ? `${rate((of(last) - of(first)) / spent)}/s` : "–");
  const errors = Object.entries(last.codes).map(([code, number]) => [code, number - (first.codes[code] ?? 0)])
    .filter(([code, number]) => code !== "OK" && number > 0).sort((one, other) => other[1] - one[1]);
  return [
    panel("Calls", all, aSecond(all), Object.entries(KINDS).map(([kind, title]) => [title, aSecond((look) => total(look, kind))])),
    h("div", { class: "tier" }, h("div", { class: "tier-top" }, h("h3", {}, "Latency")), h("table", { class: "latency" },
      h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col", class: "number" }, "Median"), h("th", { scope: "col", class: "number" }, "p99"))),
      h("tbody", {}, Object.entries(KINDS).map(([kind, title]) => h("tr", {}, h("th", { scope: "row" }, title),
        [0.5, 0.99].map((share) => h("td", { class: "number" }, quantile(first, last, kind, share)))))))),
    panel("Errors", failures, count(failures(last) - failures(first)), errors.map(([code, number]) => [code, count(number)])),
  ];
}

// The bound of the bucket of calls in which that share of them is reached.
function quantile(first, last, kind, share) {
  const old = new Map(first.latencies[kind]);
  const grown = last.latencies[kind].map(([bound, number]) => [bound, number - (old.get(bound) ?? 0)]);
  const of = grown.at(-1)?.[1] ?? 0;
  if (!of) return "–";
  const bounds = grown.map(([bound]) => bound), at = grown.findIndex(([, number]) => number >= share * of);
  return bounds[at] === null ? `> ${seconds(bounds[at - 1])}` : `≤ ${seconds(bounds[at])}`; // null stands for any time
}

function panel(title, of, figure, lines) {
  const rates = looks.slice(1).map((look, at) => (of(look) - of(looks[at])) / (look.at - looks[at].at));
  return h("div", { class: "tier" },
    h("div", { class: "tier-top" }, h("h3", {}, title), spark(rates, Math.max(...rates, 1e-9))),
    h("p", { class: "figure" }, figure),
    h("dl", { class: "lines small" }, lines.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}
