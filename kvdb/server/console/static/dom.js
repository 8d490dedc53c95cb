// Elements out of plain values. Text is only ever set as text, never read as HTML, because names are anybody's.

export const byId = (id) => document.getElementById(id);

// An element. attributes: `class`, `on` (listeners by event), `style` (custom properties and widths), or plain attributes.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const shown = new WeakMap();

// Fill a container anew if its values changed. What has the focus, by its data-focus, keeps it; what is open, by its data-open, stays so.
export function render(container, values, build) {
  const key = JSON.stringify(values);
  if (shown.get(container) === key) return false;
  shown.set(container, key);
  const active = container.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  const open = new Set([...container.querySelectorAll("details[open][data-open]")].map((details) => details.dataset.open));
  container.replaceChildren(...[build(values)].flat(Infinity).filter(Boolean));
  for (const details of container.querySelectorAll("details[data-open]")) if (open.has(details.dataset.open)) details.open = true;
  if (active !== undefined) {
    const found = [...container.querySelectorAll("[data-focus]")].find((element) => element.dataset.focus === active);
    found?.focus({ preventScroll: true });
  }
  return true;
}

export const forget = (container) => shown.delete(container);

// A part of a page with its title, what stands beside it, and a container of that id.
export const section = (id, title, beside) => h("section", { "aria-labelledby": `${id}-title` },
  h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), beside), h("div", { id, "aria-live": id === "plan" ? "polite" : null }));

export const empty = (title, hint) => h("div", { class: "empty" }, h("p", {}, title), hint && h("p", { class: "quiet" }, hint));
