// One context: its segments, its indexes, what queries need of it, and how one more would be answered.

import { call } from "./api.js";
import { byId, empty, forget, h, render, section } from "./dom.js";
import { ExplainPanel } from "./explain_panel.js";
import { ago, bytes, count, date, plural, seconds, share } from "./format.js";
import { heatMap, MEASURES } from "./heat_map.js";
import { bar, segmentTable } from "./segments.js";
import { table } from "./table.js";

export class ContextPage {
  // root: the element that it fills.
  constructor(root, name) {
    this.root = root;
    this.name = name;
    this.measure = "retrieved";
    this.explain = new ExplainPanel({ name });
    root.replaceChildren(
      h("p", {}, h("a", { href: "#/", class: "back" }, "← All contexts")),
      h("h1", { tabindex: -1 }, name),
      h("dl", { id: "facts", class: "facts" }),
      section("segments", "Segments"), section("indexes", "Indexes"),
      section("heat", "What queries need", h("label", {}, h("span", { class: "hidden-label" }, "Measure"), this._measures())),
      this.explain.section);
    this.title = root.querySelector("h1");
    this.title.focus({ preventScroll: true });
  }

  // Ask for the context and show it. Throws Refused.
  async refresh() {
    const context = await call("context", { name: this.name });
    const heat = context.measures.length ? await call("heat", { name: this.name, measure: this.measure }) : null;
    if (!this.title.isConnected) return; // another page is shown meanwhile
    const { used, ...facts } = context;
    render(byId("facts"), facts, () => factList({ ...facts, used }));
    for (const time of byId("facts").querySelectorAll("time[data-used]")) time.dataset.at = used;
    render(byId("segments"), [context.views, context.segments], () => segmentsOf(context));
    render(byId("indexes"), context.indexes, indexTable);
    render(byId("heat"), heat, () => (heat ? [h("p", { class: "quiet small hint" }, MEASURES[heat.measure][1]),
      heatMap(heat, (layer) => this.explain.choose(layer))] : unknown()));
    this.explain.setLayers(context.model.layers);
  }

  _measures() {
    const options = Object.entries(MEASURES).map(([value, [title]]) => h("option", { value }, title));
    const changed = (event) => {
      this.measure = event.target.value;
      forget(byId("heat"));
      this.refresh().catch(() => {});
    };
    return h("select", { id: "measure", on: { change: changed } }, options);
  }
}

const unknown = () => empty("No query has searched this context yet.",
  "Queries that search an index show here what they need; contexts that are read whole say nothing of it.");

function factList(context) {
  const model = context.model;
  const fact = (title, ...value) => h("div", {}, h("dt", {}, title), h("dd", {}, ...value));
  const broad = (title, value) => h("div", { class: "broad" }, h("dt", {}, title), h("dd", {}, value));
  const kept = [context.pinned && "pinned", context.expires && `until ${date(context.expires)}`].filter(Boolean).join(", ");
  return [
    fact("Tokens", count(context.tokens)),
    fact("Bytes", h("span", { title: `${count(context.nbytes)} bytes` }, bytes(context.nbytes))),
    fact("Where", context.resident ? "in memory" : "on disk"),
    fact("Uses", count(context.uses)),
    fact("Last used", h("time", { "data-at": context.used, "data-used": true }, ago(context.used))),
    fact("Stored", h("time", { title: date(context.created), "data-at": context.created }, ago(context.created))),
    broad("Model", model.name),
    broad("Shape", model.shapes ? `${model.layers} layers: ${model.shapes}, ${model.dtype}` : `${model.layers} layers, ${model.q_heads} query heads on ${model.kv_heads} KV heads of ${model.head_dim}, ${model.dtype}`),
    context.kind !== "prefix" && fact("Kind", context.kind),
    context.format && broad("Format", `${context.format}; changed keys by ${share(context.key_error)}, values by ${share(context.value_error)}`),
    kept && fact("Kept", kept),
    Object.entries(context.metadata).map(([key, value]) => broad(key, value)),
  ];
}

function segmentsOf(context) {
  return [
    bar(context, true),
    h("p", { class: "quiet small" }, `${plural(context.segments, "segment")}. The same colour is the same segment, in every context that sees it.`),
    h("details", { "data-open": "segments" }, h("summary", { "data-focus": "segments" }, "As a table"), segmentTable(context)),
  ];
}

function indexTable(indexes) {
  if (!indexes.length) return empty("No index stands over this context.", "It is read whole, or by what its pages tell; kvdb index builds one.");
  return table("indexes", [
    { title: "Index", of: (index) => index.kind, text: true },
    { title: "Segment", of: (index) => index.segment, shown: (index) => `#${index.segment} · ${count(index.tokens)} tokens` },
    { title: "Layers", of: (index) => index.layers, shown: (index) => `${index.layers} of ${index.layers_total}` },
    { title: "Bytes", of: (index) => index.nbytes, shown: (index) => bytes(index.nbytes), hint: (index) => `${count(index.nbytes)} bytes` },
    { title: "Took", of: (index) => index.seconds || null, shown: (index) => (index.seconds ? seconds(index.seconds) : "–") },
    { title: "State", text: true, of: (index) => index.state, shown: (index) => [index.state, index.progress < 1 && ` ${share(index.progress)}`, index.error && `: ${index.error}`] },
  ], indexes);
}
