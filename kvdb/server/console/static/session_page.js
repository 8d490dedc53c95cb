// One session that has a label: what it did, and how its next query would be answered.

import { call, Refused } from "./api.js";
import { byId, h, render } from "./dom.js";
import { ExplainPanel } from "./explain_panel.js";
import { bytes, count, plural, seconds, share } from "./format.js";

export class SessionPage {
  // root: the element that it fills.
  constructor(root, label) {
    this.root = root;
    this.label = label;
    this.explain = new ExplainPanel({ session: label });
    root.replaceChildren(
      h("p", {}, h("a", { href: "#/", class: "back" }, "← All sessions")),
      h("h1", { tabindex: -1 }, label),
      h("dl", { id: "facts", class: "facts" }),
      this.explain.section);
    this.title = root.querySelector("h1");
    this.title.focus({ preventScroll: true });
  }

  // Ask for the session and show it. Throws Refused.
  async refresh() {
    const { sessions } = await call("sessions");
    const session = sessions.find((one) => one.label === this.label);
    if (session === undefined) throw new Refused(404, "This session is not open any more.");
    if (!this.title.isConnected) return; // another page is shown meanwhile
    render(byId("facts"), session, facts);
    this.explain.setLayers(session.model.layers);
  }
}

function facts(session) {
  const fact = (title, ...value) => h("div", {}, h("dt", {}, title), h("dd", {}, ...value));
  const rules = Object.entries(session.rules).sort((one, other) => other[1] - one[1]);
  return [
    fact("Tokens", count(session.tokens)),
    fact("Reused", `${count(session.reused)} (${share(session.tokens ? session.reused / session.tokens : 0)})`),
    fact("Own", `${plural(session.tail, "token")}, ${bytes(session.nbytes)}`),
    fact("Queries", count(session.queries)),
    fact("Attended", share(session.retrieved)),
    fact("Missed at most", share(session.missed_bound)),
    fact("Kernels", session.queries ? seconds(session.seconds) : "–"),
    fact("Model", `${session.model.name}, ${session.model.layers} layers`),
    h("div", { class: "broad" }, h("dt", {}, "Answered by"), h("dd", {}, rules.length ? rules.map(([rule, calls]) => h("div", {}, h("code", {}, rule), ` ${count(calls)}`)) : "–")),
  ];
}
