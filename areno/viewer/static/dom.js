// Elements are made of text nodes and attributes only: nothing that a run contains is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function attribute(element, name, value) {
  if (/^on/i.test(name)) throw new Error(`${name} is not an attribute; pass event handlers in "on"`);
  if (name === "href" && !/^(#|\/(?!\/))/.test(value)) throw new Error(`${value} is not a link to this server; use an address that begins with # or /`);
  if (value === true) element.setAttribute(name, "");
  else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
}

const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "value" && "value" in element) {
      element.value = value;
    } else attribute(element, name, value);
  }
  element.append(...present(children));
  return element;
}

/** An HTML element; `properties` holds its attributes, and its event handlers in `on`. */
export function el(tag, properties, ...children) {
  return build(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function svg(tag, properties, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

/** Replace the children of an element; the focus stays on the same child, or moves to the new one with its id or address. */
export function fill(element, ...children) {
  const old = element.contains(document.activeElement) ? document.activeElement : null;
  element.replaceChildren(...present(children));
  if (!old || old === document.activeElement) return;
  const isNew = (one) => (old.id ? one.id === old.id : one.href && one.href === old.href);
  const focused = old.isConnected ? old : [...element.querySelectorAll("[id], a")].find(isNew);
  focused?.focus({ preventScroll: true });
}

/** A note on the bytes of a file that were not read, if there are any. */
export function leftOut(file, bytes) {
  return bytes > 0 && el("p", { class: "problem" },
    `${bytes.toLocaleString("en")} bytes of ${file} are not shown, because their lines are damaged or longer than 16 MiB.`);
}

/** Tell a screen reader about a change. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** A number with at most four significant digits; integers below a billion in full. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** A count with its noun: "1 step", "2 steps". */
export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !(seconds >= 0)) return "–";
  if (seconds < 60) return `${number(Math.round(seconds * 10) / 10)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function when(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString() : "–";
}

/** Any value of a configuration as text. */
export function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Pairs of dotted names and values of a nested object. */
export function flat(value, prefix = "") {
  return Object.entries(value ?? {}).flatMap(([name, item]) =>
    item && typeof item === "object" && !Array.isArray(item) && Object.keys(item).length
      ? flat(item, `${prefix}${name}.`)
      : [[prefix + name, item]],
  );
}

/** A table with a caption; `rows` are lists of cells (text or elements); the first cell is the row's header. */
export function table(caption, heads, rows, properties = {}) {
  return el(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      properties,
      el("caption", { class: "hidden-text" }, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, place) =>
        place ? el("td", {}, cell) : el("th", { scope: "row" }, cell))))),
    ),
  );
}

/** A form field below its label. */
export function field(label, control) {
  return el("label", { class: "field" }, el("span", {}, label), control);
}

export function select(options, value, change, properties = {}) {
  const control = el("select", { ...properties, on: { change: () => change(control.value) } },
    options.map(([key, text]) => el("option", { value: key }, text)));
  control.value = value;
  return control;
}

/** The badge of a run's state. */
export function badge(state) {
  return el("span", { class: `badge ${state}` }, state);
}
