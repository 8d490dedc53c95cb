// Tables that sort: by the buttons in their headers, up, down, and as they came. A table stays sorted when it is shown anew.

import { h } from "./dom.js";

const KEY = "kvdb-sort";
const chosen = JSON.parse(sessionStorage.getItem(KEY) ?? "{}"); // [title, direction] by table, 1 for up and -1 for down
const words = new Intl.Collator("en", { numeric: true });

// A table. columns: { title, of: what a row is sorted by, shown: what its cell holds, if not that, text: whether it is no number,
// hint, class }. The first heads the row. Rows without a value come last, and rows with the same stay as they came.
export function table(name, columns, rows) {
  const lines = rows.map((row) => ({ row, line: h("tr", {}, columns.map((column, at) => cell(column, row, at))) }));
  const body = h("tbody");
  const heads = columns.map((column) => h("th", { scope: "col", class: kind(column) }, h("button", {
    type: "button", class: "sort", "data-focus": `${name}:${column.title}`, on: { click: () => (turn(name, column.title), sort()) },
  }, column.title)));
  function sort() {
    const [title, direction] = chosen[name] ?? [];
    const by = columns.find((column) => column.title === title);
    const ordered = by ? lines.toSorted((one, other) => compare(by.of(one.row), by.of(other.row), direction)) : lines;
    body.replaceChildren(...ordered.map(({ line }) => line));
    columns.forEach((column, at) => heads[at].setAttribute("aria-sort", column !== by ? "none" : direction > 0 ? "ascending" : "descending"));
  }
  sort();
  return h("table", { class: `wide ${name}` }, h("thead", {}, h("tr", {}, heads)), body);
}

function cell(column, row, at) {
  const content = (column.shown ?? column.of)(row), attributes = { class: kind(column), title: column.hint?.(row) };
  return at ? h("td", { ...attributes, "data-label": column.title }, content) : h("th", { scope: "row", class: column.class }, content);
}

const kind = (column) => [column.text ? "" : "number", column.class ?? ""].join(" ").trim();

function turn(name, title) {
  const [before, direction] = chosen[name] ?? [];
  if (before !== title) chosen[name] = [title, 1];
  else if (direction > 0) chosen[name] = [title, -1];
  else delete chosen[name];
  sessionStorage.setItem(KEY, JSON.stringify(chosen));
}

function compare(one, other, direction) {
  const missing = (one === null) - (other === null);
  if (missing || one === null) return missing;
  return direction * (typeof one === "string" ? words.compare(one, other) : one - other);
}
