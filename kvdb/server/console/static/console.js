// The console: which page is shown, and when it is asked for anew.

import { call, hasToken, setToken } from "./api.js";
import { ContextPage } from "./context_page.js";
import { SessionPage } from "./session_page.js";
import { byId, forget, render } from "./dom.js";
import { callPanels, noteCalls, sinceWhen } from "./calls_panel.js";
import { age, ago, count } from "./format.js";
import { contextTable, note, sessionTable, tierCards } from "./home_page.js";

const EVERY_MS = 2000;
const PAGE = 50;
const PAGES = { context: ContextPage, session: SessionPage };

let paused = false;
let page = null; // one of PAGES, or null for the first page
let turn = 0; // counts refreshes, so that an answer that comes too late is not shown
let timer = 0;
let before = [""]; // the names that the pages so far begin behind
let next = null;

async function refresh() {
  clearTimeout(timer);
  const mine = ++turn;
  try {
    const told = await call("overview");
    if (mine !== turn) return;
    letIn();
    showOverview(told);
    await (page === null ? showHome(mine) : page.refresh());
    if (mine === turn) say(paused ? "paused" : "live", "");
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) askForToken();
    else fail(error);
  }
  for (const time of document.querySelectorAll("time[data-at]")) time.textContent = ago(Number(time.dataset.at));
  for (const time of document.querySelectorAll("time[data-since]")) time.textContent = age(Number(time.dataset.since));
  if (!paused && byId("login").hidden && mine === turn) timer = setTimeout(() => (document.hidden ? null : refresh()), EVERY_MS);
}

function showOverview(told) {
  byId("version").textContent = told.version;
  byId("contexts-count").textContent = count(told.contexts);
  byId("sessions-count").textContent = count(told.sessions);
  note(told.tiers);
  if (page === null) {
    forget(byId("tiers")); // the lines go on although the numbers stay
    render(byId("tiers"), told.tiers, tierCards);
  }
}

async function showHome(mine) {
  const prefix = byId("prefix").value;
  const [calls, sessions, contexts] = await Promise.all(
    [call("calls"), call("sessions"), call("contexts", { prefix, after: before.at(-1), limit: PAGE })]);
  if (mine !== turn) return;
  byId("calls-section").hidden = calls.codes === undefined;
  if (calls.codes !== undefined) showCalls(calls);
  render(byId("sessions"), sessions, sessionTable);
  render(byId("contexts"), { ...contexts, prefix, paged: before.length > 1 }, contextTable);
  next = contexts.next;
  byId("pager").hidden = before.length === 1 && next === null;
  byId("previous").disabled = before.length === 1;
  byId("next").disabled = next === null;
  byId("page").textContent = `page ${before.length}, sorted by itself`;
}

function showCalls(calls) {
  noteCalls(calls, performance.now() / 1000);
  byId("calls-since").textContent = sinceWhen();
  byId("calls").replaceChildren(...callPanels());
}

function route() {
  const [, kind, written] = location.hash.match(/^#\/(context|session)\/(.+)$/) ?? [];
  let name = null;
  try {
    if (kind) name = decodeURIComponent(written);
  } catch {
    location.hash = "#/"; // no name is written so
    return;
  }
  const wasOther = page !== null;
  page = name === null ? null : new PAGES[kind](byId("context"), name);
  byId("home").hidden = page !== null;
  byId("context").hidden = page === null;
  if (page === null) byId("context").replaceChildren();
  document.title = name === null ? "kvdb console" : `${name} · kvdb`;
  byId("problem").hidden = true;
  if (page !== null || wasOther) window.scrollTo(0, 0);
  refresh();
}

function say(state, text) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = state;
  byId("problem").hidden = text === "";
  byId("problem").textContent = text;
}

function fail(error) {
  if (error.status === 404 && page !== null) say(paused ? "paused" : "live", page instanceof ContextPage ? "There is no context of this name any more." : error.message);
  else if (error.status === 0) say("offline", `The server does not answer. ${paused ? "" : "Trying again every 2 s; what is shown is from before."}`);
  else say("failed", error.message);
}

function askForToken() {
  say("locked", hasToken() ? "The server does not know this token." : "");
  setToken("");
  byId("main").hidden = true;
  if (byId("login").hidden) {
    byId("login").hidden = false;
    byId("token").focus();
  }
}

function letIn() {
  byId("login").hidden = true;
  byId("main").hidden = false;
}

function pause() {
  paused = !paused;
  byId("pause").textContent = paused ? "Resume" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) {
    clearTimeout(timer);
    say("paused", "");
  } else refresh();
}

function turnPage(forward) {
  if (forward && next !== null) before.push(next);
  else if (!forward && before.length > 1) before.pop();
  refresh();
}

byId("pause").addEventListener("click", pause);
byId("next").addEventListener("click", () => turnPage(true));
byId("previous").addEventListener("click", () => turnPage(false));
byId("prefix").addEventListener("input", () => ((before = [""]), refresh()));
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value);
  byId("token").value = "";
  refresh();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "p" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) pause();
});
document.addEventListener("visibilitychange", () => !document.hidden && !paused && refresh());
window.addEventListener("hashchange", route);
route();
