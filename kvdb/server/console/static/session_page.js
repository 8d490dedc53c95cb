// One session: what it did, and how its next query would be answered.

import { call, Refused } from "./api.js";
import { byId, h, render } from "./dom.js";
import { ExplainPanel } from "./explain_panel.js";
import { age, bytes, count, date, plural, seconds, share } from "./format.js";

export class SessionPage {
  // root: the element that it fills.
  constructor(root, id) {
    this.root = root;
    this.id = id;
    this.explain = new ExplainPanel({ session: id });
    root.replaceChildren(
      h("p", {}, h("a", { href: "#/", class: "back" }, "← All sessions")),
      h("h1", { tabindex: -1 }, id),
      h("dl", { id: "facts", class: "facts" }),
      this.explain.section);
    this.title = root.querySelector("h1");
    this.title.focus({ preventScroll: true });
  }

  // Ask for the session and show it. Throws Refused.
  async refresh() {
    const { sessions } = await call("sessions");
    const session = sessions.find((one) => one.id === this.id);
    if (session === undefined) throw new Refused(404, "This session is not open any more.");
    if (!this.title.isConnected) return; // another page is shown meanwhile
    this.title.textContent = session.label || session.id;
    render(byId("facts"), session, facts);
    this.explain.setLayers(session.model.layers);
  }
}

function facts(session) {
  const fact = (title, ...value) => h("div", {}, h("dt", {}, title), h("dd", {}, ...value));
  const broad = (title, ...value) => h("div", { class: "broad" }, h("dt", {}, title), h("dd", {}, ...value));
  const rules = Object.entries(session.rules).sort((one, other) => other[1] - one[1]);
  return [
    fact("Id", session.id),
    fact("Tenant", session.tenant || "–"),
    fact("Age", h("time", { title: date(session.opened), "data-since": session.opened }, age(session.opened))),
    fact("Tokens", count(session.tokens)),
    fact("Reused", `${count(session.reused)} (${share(session.tokens ? session.reused / session.tokens : 0)})`),
    fact("Own", `${plural(session.tail, "token")}, ${bytes(session.nbytes)}`),
    fact("Queries", count(session.queries)),
    fact("Attended", share(session.retrieved)),
    fact("Missed at most", share(session.missed_bound)),
    fact("Kernels", session.queries ? seconds(session.seconds) : "–"),
    broad("Model", `${session.model.name}, ${session.model.layers} layers`),
    broad("Answered by", rules.length ? rules.map(([rule, calls]) => h("div", {}, h("code", {}, rule), ` ${count(calls)}`)) : "–"),
  ];
}
