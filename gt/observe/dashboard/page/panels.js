// Panels of figures: workers, sessions, lines, errors, memory, curves, traffic. Each shows a store, or says why it cannot.
import { Chart, areas, curve, drawCursor, matrix, move, nearest, theme, timeScale } from "./charts.js";
import { Table, barCell, make, number, percent, place, rate, seconds, setText, size, stateCell } from "./format.js";

export const USES = ["weights", "optimizer", "gradients", "activations", "other"];
const USE_NAMES = { other: "use not told", activations: "activations and temporaries", optimizer: "optimizer state" };

export class Panel {
  constructor(id) {
    this.section = document.getElementById(id);
    this.note = this.section.querySelector(".note");
    this.body = this.section.querySelector(".body");
    this.message = make("p", { class: "message" });
    this.content = make("div");
    this.body.append(this.message, this.content);
    this.state("loading", "Waiting for the first records of the server …");
  }

  // kind: "loading", "empty", "error" or "ready".
  state(kind, text = "") {
    if (this.section.dataset.state !== kind) this.section.dataset.state = kind;
    if (this.message.hidden !== (kind === "ready")) this.message.hidden = kind === "ready";
    if (this.content.hidden !== (kind !== "ready")) this.content.hidden = kind !== "ready";
    setText(this.message, text);
  }

  update(store) {
    if (store.state === null) {
      if (store.problem) this.state("error", `No records: ${store.problem}`);
      else this.state("loading", "Waiting for the first records of the server …");
      return;
    }
    const why = this.missing(store);
    if (why) { this.state("empty", why); setText(this.note, ""); return; }
    this.state("ready");
    this.show(store);
  }

  missing() { return ""; }
}

export const sessionsOf = (store) => store.state.sessions.filter((s) => store.session < 0 || s.number === store.session);
export function workersOf(store) {
  if (store.session < 0) return store.state.workers;
  const names = new Set(sessionsOf(store).flatMap((s) => s.workers));
  return store.state.workers.filter((w) => names.has(w.name));
}
// Why a panel has nothing of the session that is chosen, or of all: "" while there are sessions.
export function noSession(store, all) {
  if (sessionsOf(store).length) return "";
  return store.session < 0 ? all : `Session ${store.session} has ended.`;
}
export const ofSession = (store) => (store.session < 0 ? "" : ` of session ${store.session}`);
export const byName = (a, b) => a.length - b.length || (a < b ? -1 : a > b ? 1 : 0);
const legend = (rows) => make("ul", { class: "legend" }, ...rows.map(([colour, text]) => make("li", {}, make("span", { class: "swatch", colour }), text)));

export class Tiles {
  constructor() { this.list = document.getElementById("tiles"); this.cells = new Map(); }

  update(store) {
    if (store.state === null) return;
    const workers = workersOf(store), sessions = sessionsOf(store), sum = (rows, key) => rows.reduce((all, row) => all + (row[key] ?? 0), 0);
    const names = new Set(workers.map((w) => w.name)), links = store.state.links.filter((l) => names.has(l.source));
    const known = (rows, key) => rows.some((row) => row[key] !== null && row[key] !== undefined);
    const alive = workers.filter((w) => w.state !== "lost");
    this.set("workers", String(alive.length), workers.length > alive.length ? `${workers.length - alive.length} lost` : `${alive.filter((w) => w.state === "busy").length} busy`);
    this.set("sessions", String(sessions.length), store.state.queue.length ? `${store.state.queue.length} waiting` : "");
    this.set("steps a second", known(sessions, "steps_per_second") ? rate(sum(sessions, "steps_per_second")) : "–", "");
    this.set("ops a second", known(sessions, "ops_per_second") ? rate(sum(sessions, "ops_per_second")) : "–", "planned");
    this.set("busy", known(alive, "busy_share") ? percent(sum(alive, "busy_share") / Math.max(1, alive.length)) : "–", "of time");
    this.set("tensors", size(sum(workers, "live_bytes")), `${sum(workers, "live_tensors").toLocaleString("en")} alive`);
    this.set("sent between workers", known(links, "bytes_per_second") ? `${size(sum(links, "bytes_per_second"))}/s` : "–", size(sum(links, "bytes")));
  }

  set(name, value, more) {
    let cell = this.cells.get(name);
    if (!cell) {
      cell = { value: document.createTextNode(""), more: make("small") };
      this.list.append(make("div", {}, make("dt", {}, name), make("dd", { "data-figure": name }, cell.value, " ", cell.more)));
      this.cells.set(name, cell);
    }
    if (cell.value.data !== value) cell.value.data = value;
    setText(cell.more, more);
  }
}

const useParts = (uses, live) => {
  const known = USES.slice(0, 4).map((use) => [uses[use] ?? 0, theme[use]]);
  return [...known, [Math.max(0, live - known.reduce((all, [value]) => all + value, 0)), theme.other]];
};
const summed = (worker) => {
  const total = {};
  for (const uses of Object.values(worker.memory.uses ?? {})) for (const [use, value] of Object.entries(uses)) total[use] = (total[use] ?? 0) + value;
  return total;
};

function noWorkers(store) {
  const none = "No worker has joined. `gt worker` starts one, or gt.gpu_workers(n) in a program.";
  return store.session < 0 ? none : noSession(store, none) || `Session ${store.session} has no workers.`;
}

export class Workers extends Panel {
  constructor() {
    super("workers");
    this.table = new Table([["worker"], ["host"], ["device"], ["state"], ["busy"], ["instr./s", "number"], ["tensors"], ["process", "number"], ["limit", "number"], ["at", "code"]], "Workers");
    this.content.append(this.table.element);
  }

  missing(store) { return workersOf(store).length ? "" : noWorkers(store); }

  show(store) {
    const rows = [...workersOf(store)].sort((a, b) => byName(a.name, b.name)), most = Math.max(1, ...rows.map((w) => w.live_bytes));
    this.table.update(rows.map((w) => [
      w.name, w.host, w.device, stateCell(w.state, w.reason), barCell([[w.busy_share ?? 0, theme.accent]], 1, percent(w.busy_share)), rate(w.ops_per_second),
      barCell(useParts(summed(w), w.live_bytes), most, tensors(w)), taken(w), limit(w),
      w.current.op ? `${w.current.op} ${place(w.current)}` : w.reason || "–",
    ]));
    setText(this.note, store.state.hosts.map((h) => `${h.name}: ${h.workers.length}`).join(", "));
  }
}

const brief = (bytes) => size(bytes).replace("iB", "").replace(" ", "");
const tensors = (w) => (w.age < 0 && w.state !== "lost" ? "–" : size(w.live_bytes)); // one that has not answered yet
const limit = (w) => (w.age < 0 ? "–" : w.limit ? size(w.limit) : "none");
const taken = (w) => { const bytes = w.memory.process ?? w.memory.peak; return bytes === undefined ? "–" : size(bytes); };

export class Sessions extends Panel {
  constructor() {
    super("sessions");
    this.table = new Table([["session", "number"], ["user"], ["program"], ["steps/s", "number"], ["ops/s", "number"], ["ops", "number"], ["uploaded", "number"], ["fetched", "number"], ["waits for"], ["memory"], ["logged"], ["at", "code"]], "Sessions");
    this.content.append(this.table.element);
  }

  missing(store) {
    return noSession(store, "No program is connected.");
  }

  show(store) {
    const rows = sessionsOf(store), total = (s) => (s.memory ? Object.values(s.memory).reduce((a, b) => a + b, 0) : 0);
    const most = Math.max(1, ...rows.map(total));
    this.table.update(rows.map((s) => [
      String(s.number), s.user, s.program, rate(s.steps_per_second), rate(s.ops_per_second), s.ops.toLocaleString("en"), size(s.uploaded), size(s.fetched),
      s.waits || "–", s.memory ? barCell(useParts(s.memory, total(s)), most, size(total(s))) : blank,
      Object.entries(s.values).map(([name, value]) => `${name}=${number(value)}`).join(" ") || "–",
      s.current.op ? `${s.current.op} ${place(s.current)} ${s.current.group}` : "–",
    ]));
    setText(this.note, store.state.queue.map((q) => `${q.place}. in the queue: ${q.user} ${q.program}`).join("; "));
  }
}

const blank = (cell) => { if (cell.textContent !== "–") cell.replaceChildren("–"); };

export class Lines extends Panel {
  constructor() {
    super("lines");
    this.table = new Table([["share", "number"], ["session", "number"], ["line", "code"], ["op", "code"]], "Lines");
    this.content.append(this.table.element);
  }

  rows(store) { return store.state.lines.filter((line) => store.session < 0 || line.session === store.session).slice(0, 12); }

  missing(store) { return this.rows(store).length ? "" : `No worker was seen at an op${ofSession(store)} yet. Each look at the workers is a sample.`; }

  show(store) {
    this.table.update(this.rows(store).map((line) => [percent(line.share), String(line.session), place(line), line.op]));
    setText(this.note, "share of the looks at busy workers: samples, not times");
  }
}

export class Errors extends Panel {
  constructor() {
    super("errors");
    this.list = make("ol", { class: "faults", tabindex: "0", "aria-label": "Errors, newest first" });
    this.content.append(this.list);
    this.shown = "";
  }

  rows(store) { return store.state.errors.filter((e) => store.session < 0 || e.session === store.session || e.session < 0); }

  missing(store) { return this.rows(store).length ? "" : `No op${ofSession(store)} has failed, no worker is lost, and nobody was refused.`; }

  show(store) {
    const rows = this.rows(store), key = rows.map((e) => `${e.number} ${e.at} ${e.text}`).join(); // numbers begin anew with another server
    setText(this.note, `${rows.length} of the last 64`);
    if (key === this.shown) return;
    this.shown = key;
    this.list.replaceChildren(...rows.reverse().map((e) => make("li", {},
      make("div", { class: "where" }, `${seconds(e.at)} · ${e.session >= 0 ? `session ${e.session} · ` : ""}${e.peer}${e.op ? ` · ${e.op} · ${e.file}:${e.line}${e.group ? ` · ${e.group}` : ""}` : ""}`),
      make("div", { class: "text" }, e.text))));
  }
}

// Charts by key, kept while their key is wanted.
class Charts {
  constructor(kind = "") { this.element = make("div", { class: `charts ${kind}` }); this.figures = new Map(); }

  get(key, height, label) {
    let figure = this.figures.get(key);
    if (!figure) {
      const chart = new Chart(height, label), title = make("h3", {}, label), text = make("p");
      figure = { chart, title, text, element: make("figure", {}, title, chart.canvas, chart.reader, text) };
      const { reader } = chart, swap = () => { text.hidden = Boolean(reader.textContent); reader.hidden = !text.hidden; };
      swap();
      new MutationObserver(swap).observe(reader, { childList: true });
      this.figures.set(key, figure);
      this.element.append(figure.element);
    }
    return figure;
  }

  keep(keys) {
    for (const [key, figure] of this.figures) if (!keys.has(key)) { figure.element.remove(); this.figures.delete(key); }
  }
}

// A time chart's readings by pointer and keys: `say(n)` is the text of sample n.
function readable(chart, times, say) {
  chart.times = times; chart.say = say;
  chart.reading ??= (x) => { if (chart.times.length) { chart.at = nearest(chart.times, x, chart.width); chart.redraw(); return chart.say(chart.at); } return undefined; };
  chart.step ??= (key) => { if (!chart.times.length) return undefined; chart.at = move(chart.at ?? chart.times.length, chart.times.length, key); return chart.say(chart.at); };
}
const cursor = (c, chart, width, height) => { if (chart.at !== undefined && chart.at < chart.times.length) drawCursor(c, timeScale(chart.times, width)(chart.times[chart.at]), height); };

export class Memory extends Panel {
  constructor() {
    super("memory");
    this.charts = new Charts();
    this.legend = make("div");
    this.content.append(this.charts.element, this.legend);
    this.colours = "";
  }

  missing(store) {
    const names = workersOf(store).map((w) => w.name);
    if (!names.length) return noWorkers(store);
    return store.samples.some((s) => names.some((name) => s.workers[name])) ? "" : `No worker${ofSession(store)} has told its memory yet.`;
  }

  show(store) {
    const workers = [...workersOf(store)].sort((a, b) => byName(a.name, b.name)), last = store.samples[store.samples.length - 1];
    const top = Math.max(1, ...store.samples.flatMap((s) => workers.map((w) => s.workers[w.name]?.live ?? 0)));
    for (const worker of workers) this.one(store, worker, top);
    this.charts.keep(new Set(workers.map((w) => w.name)));
    setText(this.note, `live tensors, all charts to ${size(top)}; ${seconds(last.at - store.samples[0].at)} shown. Largest of the looks at a worker, with the op that it was at.`);
    const used = USES.filter((use) => store.samples.some((s) => Object.values(s.workers).some((w) => w[use])));
    if (this.colours !== `${used}${theme.dark}`) {
      this.colours = `${used}${theme.dark}`;
      this.legend.replaceChildren(legend(used.map((use) => [theme[use], USE_NAMES[use] ?? use])));
    }
  }

  one(store, worker, top) {
    const figure = this.charts.get(worker.name, 84, `Memory of ${worker.name}`), rows = store.samples.filter((s) => s.workers[worker.name]);
    const times = rows.map((s) => s.at), peak = store.state.peaks[worker.name], at = peak?.current;
    setText(figure.title, `${worker.name} · ${tensors(worker)}`);
    const cause = at?.op ? `at ${at.op} ${place(at)}${at.group ? ` (${at.group})` : ""}` : "between ops";
    setText(figure.text, peak ? `largest ${size(peak.bytes)}, ${cause}` : "no figures yet");
    const chart = figure.chart;
    readable(chart, times, (n) => `${seconds(times[n])}: ${size(rows[n].workers[worker.name].live)}; ${USES.filter((use) => rows[n].workers[worker.name][use]).map((use) => `${use === "other" ? "not told" : use} ${size(rows[n].workers[worker.name][use])}`).join(", ")}`);
    chart.draw = (c, width, height) => {
      if (!rows.length) return;
      areas(c, width, height, times, USES.map((use) => [rows.map((s) => s.workers[worker.name][use]), theme[use]]), top);
      if (peak && peak.at >= times[0]) {
        const x = Math.min(timeScale(times, width)(peak.at), width - 4), y = height - (peak.bytes / top) * (height - 3);
        c.fillStyle = theme.bad; c.beginPath(); c.arc(Math.max(4, x), Math.max(4, y), 3, 0, 7); c.fill();
      }
      cursor(c, chart, width, height);
    };
    chart.redraw();
  }
}

const MAX_CURVES = 8; // of a session's logged numbers: as many as its history has

// Those of the history first: this language puts names such as "10" before others, the server does not.
const curveNames = (kept, values) => [...new Set([...Object.keys(kept), ...Object.keys(values)])].slice(0, MAX_CURVES);
const own = (values, name) => (Object.hasOwn(values, name) ? values[name] : null); // a program may log a number as "constructor"

export class Curves extends Panel {
  constructor() {
    super("curves");
    this.charts = new Charts("large");
    this.content.append(this.charts.element);
  }

  missing(store) { return noSession(store, "No program is connected, so that nothing is planned and nothing logged."); }

  show(store) {
    const keys = new Set();
    for (const session of sessionsOf(store)) {
      const rows = store.samples.filter((s) => s.sessions[session.number]), of = (row) => row.sessions[session.number];
      const curves = [["ops a second", (row) => of(row).ops, theme.F, session.ops_per_second], ["steps a second", (row) => of(row).steps, theme.W, session.steps_per_second]];
      for (const name of curveNames(rows.length ? of(rows[rows.length - 1]).values : {}, session.values)) curves.push([name, (row) => own(of(row).values, name), theme.B, own(session.values, name)]);
      for (const [n, [name, value, colour, now]] of curves.entries()) {
        const values = rows.map(value), logged = n > 1;
        if (!logged && name === "steps a second" && !values.some((v) => v !== null)) continue;
        const key = `${session.number} ${logged ? "logged" : ""} ${name}`; // a program may log a number of that name
        keys.add(key);
        this.one(this.charts.get(key, 92, `Session ${session.number}: ${name}`), `session ${session.number} · ${name} · ${number(now)}`, rows.map((s) => s.at), values, colour, !logged);
      }
    }
    this.charts.keep(keys);
    const silent = sessionsOf(store).filter((s) => !Object.keys(s.values).length), many = sessionsOf(store).filter((s) => Object.keys(s.values).length > MAX_CURVES);
    const more = many.map((s) => `session ${s.number} logs ${Object.keys(s.values).length} numbers, the first ${MAX_CURVES} have a curve`);
    setText(this.note, [...(silent.length ? ["gt.log(loss=loss) in the program adds a curve"] : []), ...more].join("; "));
  }

  one(figure, title, times, values, colour, fromZero) {
    const chart = figure.chart, finite = values.map((v) => (typeof v === "string" ? null : v)); // texts: nan, inf
    setText(figure.title, title);
    setText(figure.text, values.every((v) => v === null) ? "no figures yet: a rate needs two looks" : finite.every((v) => v === null) ? "no finite number yet" : "");
    readable(chart, times, (n) => `${seconds(times[n])}: ${number(values[n])}`);
    chart.draw = (c, width, height) => { if (times.length) curve(c, width, height, times, finite, colour, fromZero); cursor(c, chart, width, height); };
    chart.redraw();
  }
}

export class Traffic extends Panel {
  constructor(changed) {
    super("traffic");
    this.chart = new Chart(260, "Bytes between workers: a row sends, a column receives");
    this.rate = make("button", { type: "button", "aria-pressed": "false" }, "a second");
    this.hosts = make("button", { type: "button", "aria-pressed": "false" }, "by host");
    for (const button of [this.rate, this.hosts]) button.addEventListener("click", () => { button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true"); changed(this); });
    this.content.append(make("div", { class: "tools" }, this.rate, this.hosts), this.chart.canvas, this.chart.reader);
    this.chart.reading = (x, y) => this.choose(Math.floor((y - this.shape.top) / this.shape.cell), Math.floor((x - this.shape.left) / this.shape.cell));
    this.chart.step = (key) => {
      const { row = 0, column = -1 } = this.chart.chosen ?? {}, last = this.names.length - 1;
      const [r, k] = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], Home: [0, 0], End: [last, last] }[key];
      return this.choose(Math.max(0, Math.min(r, last)), Math.max(0, Math.min(k, last)));
    };
  }

  choose(row, column) {
    if (!(row >= 0 && column >= 0 && row < this.names.length && column < this.names.length)) return undefined;
    this.chart.chosen = { row, column };
    this.chart.redraw();
    const value = this.values[row][column];
    if (row === column && !value) return `${this.names[row]} sends nothing to itself`;
    return `${this.names[row]} to ${this.names[column]}: ${value ? size(value) : "nothing"}${value && this.per ? " a second" : ""}`;
  }

  missing(store) {
    const names = new Set(workersOf(store).map((w) => w.name));
    return store.state.links.some((l) => names.has(l.source)) ? "" : noSession(store, "") || `No worker${ofSession(store)} has sent tensors to another.`;
  }

  show(store) {
    const hosts = this.hosts.getAttribute("aria-pressed") === "true", host = new Map(store.state.workers.map((w) => [w.name, w.host]));
    this.per = this.rate.getAttribute("aria-pressed") === "true";
    const label = (name) => (hosts ? host.get(name) ?? "gone" : name), shown = new Set(workersOf(store).map((w) => w.name));
    const links = store.state.links.filter((l) => shown.has(l.source));
    this.names = [...new Set([...shown, ...links.map((l) => l.target)].map(label))].sort(byName);
    const index = new Map(this.names.map((name, n) => [name, n]));
    this.values = this.names.map(() => this.names.map(() => 0));
    for (const link of links) this.values[index.get(label(link.source))][index.get(label(link.target))] += (this.per ? link.bytes_per_second : link.bytes) ?? 0;
    const most = Math.max(1, ...this.values.flat()), total = this.values.flat().reduce((a, b) => a + b, 0);
    setText(this.note, `${size(total)}${this.per ? " a second" : " since the workers' start"}; a row sends, a column receives; darkest: ${size(most)}`);
    this.chart.fit = (width) => { // also when the page becomes narrower, as a phone that is turned
      const left = 56, top = 48, cell = Math.max(3, Math.min(46, Math.floor((width - left - 4) / this.names.length)));
      this.shape = { left, top, cell, say: brief };
      this.chart.resize(top + cell * this.names.length + 4);
    };
    this.chart.fit(this.chart.width || 400);
    this.chart.draw = (c) => matrix(c, this.names, this.values, most, this.shape, this.chart.chosen);
    this.chart.redraw();
  }
}
