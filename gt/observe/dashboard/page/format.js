// Text of figures, and elements made of text: nothing from the server is ever markup.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function size(bytes) {
  let unit = 0, value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export const rate = (value) => (value === null || value === undefined ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2))));
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(Math.min(value, 1) * 100)}%`);
export const share = (value) => `${(value * 100).toFixed(1)}%`;

export function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 1) return `${Number(value.toPrecision(3))} s`;
  return value >= 1e-3 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number((value * 1e6).toPrecision(3))} µs`;
}

export const place = (at) => (at && at.file ? `${at.file.split("/").pop()}:${at.line}` : "no line");

// An element with a class, text or children. Text is set as text.
export function make(tag, about = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name === "class") element.className = value;
    else if (name === "colour") element.style.background = value;
    else if (value !== undefined && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Names of ops, files and groups: a line ends between their parts, not within a word.
export function setCode(element, text) {
  if (element.textContent === text) return;
  element.replaceChildren(...text.split(/(?<=[_/])|(?=\.)/).flatMap((part, n) => (n ? [make("wbr"), part] : [part])));
}

// A table that keeps its cells, so that a redraw changes texts and builds nothing anew.
export class Table {
  constructor(columns, label) {
    this.columns = columns;
    this.body = make("tbody");
    const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", { class: kind, scope: "col" }, title)));
    // Roles by name: on a phone a row is a card, and browsers would no longer call it one of a table
    this.element = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      make("table", { role: "table" }, make("thead", {}, head), this.body));
  }

  // rows: lists of texts, or of functions that fill a cell.
  update(rows) {
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((row, n) => {
      const line = this.body.rows[n] ?? this.body.appendChild(make("tr", { role: "row" }, ...this.columns.map(([title, kind]) => make("td", { class: kind, role: "cell", "data-title": title }))));
      row.forEach((value, k) => {
        if (typeof value === "function") value(line.cells[k]);
        else if (this.columns[k][1] === "code") setCode(line.cells[k], String(value));
        else setText(line.cells[k], value);
      });
    });
  }
}

export function stateCell(state, reason) {
  return (cell) => {
    const badge = cell.firstElementChild ?? cell.appendChild(make("span", { class: "state" }));
    badge.className = `state ${["busy", "idle", "silent", "restarting", "lost"].includes(state) ? state : ""}`;
    badge.title = reason;
    setText(badge, state);
  };
}

// parts: [value, colour], of a whole.
export function barCell(parts, whole, label) {
  return (cell) => {
    if (!cell.firstElementChild) cell.replaceChildren();
    const bar = cell.firstElementChild ?? cell.appendChild(make("span", { class: "bar", role: "img" }));
    const text = cell.childNodes[1] ?? cell.appendChild(document.createTextNode(""));
    if (bar.getAttribute("aria-label") !== label) bar.setAttribute("aria-label", label);
    while (bar.children.length > parts.length) bar.lastElementChild.remove();
    parts.forEach(([value, colour], n) => {
      const part = bar.children[n] ?? bar.appendChild(make("i"));
      part.style.width = `${whole ? (100 * value) / whole : 0}%`;
      part.style.background = colour;
    });
    const said = ` ${label}`;
    if (text.data !== said) text.data = said;
  };
}
