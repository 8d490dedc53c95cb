// A layer to choose, and how its next query would be answered.

import { call } from "./api.js";
import { byId, empty, h, render, section } from "./dom.js";
import { planTree } from "./plan_tree.js";

export class ExplainPanel {
  // of: whose queries: { name } of a context, or { session }, its label.
  constructor(of) {
    this.of = of;
    this.layers = 0;
    const asked = (event) => {
      event.preventDefault();
      this._explain(event.submitter?.value === "analyze");
    };
    const hint = "Carry the plan out too, for a query that was kept, and compare it with exact attention";
    this.section = section("plan", "EXPLAIN", h("form", { id: "explain", class: "row", on: { submit: asked } },
      h("label", {}, "Layer ", h("select", { id: "layer" })),
      h("button", { type: "submit", value: "plan" }, "Explain"),
      h("button", { type: "submit", value: "analyze", class: "main", title: hint }, "Explain analyze")));
  }

  setLayers(layers) {
    if (layers === this.layers) return;
    this.layers = layers;
    byId("layer").replaceChildren(...Array.from({ length: layers }, (_, layer) => h("option", { value: layer }, String(layer))));
    if (!byId("plan").childElementCount) byId("plan").append(empty("See how a query of a layer would be answered.", "Explain analyze carries it out too."));
  }

  choose(layer) {
    byId("layer").value = String(layer);
    this._explain(false);
  }

  async _explain(analyze) {
    const layer = byId("layer").value, into = byId("plan"), buttons = byId("explain").querySelectorAll("button");
    into.setAttribute("aria-busy", "true");
    for (const button of buttons) button.disabled = true;
    try {
      const plan = await call("explain", { ...this.of, layer, analyze });
      render(into, [plan], () => planTree(plan));
    } catch (error) {
      render(into, error.message, () => h("p", { class: "problem", role: "alert" }, error.message));
    }
    for (const button of buttons) button.disabled = false;
    into.removeAttribute("aria-busy");
  }
}
