// Panels of a program's structure: its pipeline schedule, the layouts of its parameters, its instruction log.
import { AXIS, Chart, gantt, letter, move, theme, workerColour } from "./charts.js";
import { make, seconds, setText, share, size } from "./format.js";
import { Panel, byName, noSession, ofSession, sessionsOf } from "./panels.js";

const KINDS = { F: "forward", B: "backward", I: "gradient of inputs", W: "gradient of weights", L: "loss", R: "all-reduce", O: "optimizer" };
const BUILT = 48; // parameters that are built at once: more when the list is scrolled
const MAX_LINES = 600; // of the log, on the page

export class Pipeline extends Panel {
  constructor() {
    super("pipeline");
    this.figures = new Map();
  }

  missing(store) {
    const none = noSession(store, "No program is connected.");
    if (none) return none;
    if (sessionsOf(store).some((s) => store.schedules.has(s.number))) return "";
    return `${store.session < 0 ? "No session" : `Session ${store.session}`} has replayed ${store.session < 0 ? "a" : "no"} step in a pipeline schedule. gt.compile(step, schedule=...) gives one; the function's explain() says why it has none.`;
  }

  show(store) {
    const wanted = sessionsOf(store).filter((s) => store.schedules.has(s.number)).slice(0, 4);
    for (const [number, figure] of this.figures) if (!wanted.some((s) => s.number === number)) { figure.element.remove(); this.figures.delete(number); }
    for (const session of wanted) {
      if (!this.figures.has(session.number)) {
        const figure = new Gantt(session.number);
        this.figures.set(session.number, figure);
        this.content.append(figure.element);
      }
      this.figures.get(session.number).show(session, store.schedules.get(session.number));
    }
    const all = sessionsOf(store).filter((s) => store.schedules.has(s.number)).length, more = all > wanted.length ? `; ${wanted.length} of ${all} sessions, choose one above` : "";
    setText(this.note, `last replay; upper bars measured, lower bars predicted; a gap is a wait${more}`);
  }
}

class Gantt {
  constructor(number) {
    this.chart = new Chart(120, `Pipeline schedule of session ${number}`);
    this.title = make("h3");
    this.legend = make("ul", { class: "legend" });
    this.element = make("figure", { class: "gantt" }, this.title, this.chart.canvas, this.chart.reader, this.legend);
    this.element.style.margin = "0 0 10px";
    this.chart.reading = (x, y) => this.reading(x, y);
    this.chart.step = (key) => this.step(key);
    this.shown = "";
  }

  show(session, schedule) {
    const { measured, predicted } = schedule, names = Object.keys(schedule.actions).filter((name) => schedule.actions[name].length);
    const stage = (name) => Number.parseInt(schedule.actions[name][0][0], 10) || 0;
    names.sort((a, b) => stage(a) - stage(b) || byName(a, b));
    this.lanes = names.map((name) => [name, schedule.actions[name], schedule.planned[name] ?? []]);
    const ends = this.lanes.flatMap(([, ran, planned]) => [ran, planned].map((row) => row.reduce((last, [, , to]) => Math.max(last, to), 0)));
    const end = Math.max(1e-9, ...ends), lane = this.lanes.length > 16 ? 20 : 30;
    this.shape = { left: 52, lane, end, say: seconds };
    setText(this.title, `session ${session.number}, ${session.program} · ${schedule.name} · ${seconds(measured.makespan)} · bubble ${share(measured.idle)} measured, ${share(predicted.idle)} predicted · replay ${schedule.replays}`);
    this.chart.resize(Math.max(1, this.lanes.length) * lane + AXIS);
    this.chart.draw = (c, width) => gantt(c, width, this.lanes, this.shape, this.chart.chosen);
    this.chart.redraw();
    if (!this.lanes.length) this.chart.reader.textContent = "Its actions are too many to show, or no worker has told them.";
    const letters = "FBIWLRO".split("").filter((kind) => this.lanes.some(([, ran]) => ran.some(([action]) => letter(action) === kind)));
    const key = `${letters}${theme.dark}`;
    if (key !== this.shown) {
      this.shown = key;
      this.legend.replaceChildren(...[...letters.map((kind) => [theme[kind], `${kind} ${KINDS[kind]}`]), [theme.wait, "waits"]].map(([colour, text]) => make("li", {}, make("span", { class: "swatch", colour }), text)));
    }
  }

  say(lane, at) {
    const [name, ran] = this.lanes[lane], [action, from, to] = ran[at], parts = /^(\d*)([A-Z])(\d*)$/.exec(action);
    const what = parts ? [parts[1] && `stage ${parts[1]}`, KINDS[parts[2]], parts[3] && `micro-batch ${parts[3]}`].filter(Boolean).join(", ") : "";
    return `${name} · ${action}${what ? ` · ${what}` : ""} · ${seconds(to - from)}, from ${seconds(from)} to ${seconds(to)}`;
  }

  reading(x, y) {
    const { left, lane, end } = this.shape, n = Math.floor(y / lane), time = ((x - left) / (this.chart.width - left - 2)) * end;
    if (!this.lanes[n] || time < 0) return undefined;
    const at = this.lanes[n][1].findIndex(([, from, to]) => from <= time && time <= to);
    this.chart.chosen = at < 0 ? undefined : { lane: n, at };
    this.chart.redraw();
    if (at >= 0) return this.say(n, at);
    const before = this.lanes[n][1].reduce((last, [, , to]) => (to < time ? Math.max(last, to) : last), 0);
    const after = this.lanes[n][1].reduce((next, [, from]) => (from > time ? Math.min(next, from) : next), end);
    return `${this.lanes[n][0]} waits ${seconds(Math.max(after - before, 0))}`;
  }

  step(key) {
    if (!this.lanes.length) return undefined;
    const { lane = 0, at = -1 } = this.chart.chosen ?? {}, to = key === "ArrowUp" ? lane - 1 : key === "ArrowDown" ? lane + 1 : lane;
    const row = Math.max(0, Math.min(to, this.lanes.length - 1)), count = this.lanes[row][1].length;
    this.chart.chosen = { lane: row, at: Math.max(0, to === lane ? move(at, count, key) : Math.min(at, count - 1)) };
    return this.say(row, this.chart.chosen.at);
  }
}

export class Layouts extends Panel {
  constructor(changed) {
    super("layouts");
    this.filter = make("input", { type: "search", placeholder: "filter by name, layout or shape", "aria-label": "Filter parameters" });
    this.list = make("ul", { class: "params", tabindex: "0", "aria-label": "Parameters" });
    this.legend = make("ul", { class: "legend" });
    this.content.append(make("div", { class: "tools" }, this.filter), this.list, this.legend);
    this.filter.addEventListener("input", () => changed(this));
    this.list.addEventListener("scroll", () => { if (this.list.scrollTop + 2 * this.list.clientHeight > this.list.scrollHeight) this.build(); });
    this.shown = "";
    this.rows = [];
  }

  missing(store) {
    const none = noSession(store, "No program is connected.");
    if (none) return none;
    if (sessionsOf(store).some((s) => store.layouts.get(s.number)?.tensors.length)) return "";
    return `No program${ofSession(store)} has told its parameters: a model on the device tells them soon after somebody looks.`;
  }

  show(store) {
    const sets = sessionsOf(store).filter((s) => store.layouts.has(s.number)).map((s) => [s.number, store.layouts.get(s.number)]);
    const wanted = this.filter.value.trim().toLowerCase(), key = `${sets.map(([n, l]) => `${n}:${l.order}`)}|${wanted}|${theme.dark}`;
    if (key === this.shown) return;
    this.shown = key;
    const all = sets.flatMap(([number, layouts]) => layouts.tensors.map(([name, n]) => [number, name, layouts.splits[n]]));
    const texts = new Map(sets.flatMap(([, { splits }]) => splits.map((s) => [s, ` ${s.spec} ${s.layout} ${s.mesh}`.toLowerCase()])));
    this.rows = all.filter(([, name, split]) => (name.toLowerCase() + texts.get(split)).includes(wanted));
    const used = new Set(this.rows.map(([, , split]) => split)), workers = [...new Set([...used].flatMap((s) => Object.keys(s.boxes)))].sort(byName);
    this.colours = new Map(workers.map((name, n) => [name, workerColour(n)]));
    this.several = sets.length > 1;
    const kept = wanted === this.wanted ? this.list.childElementCount : 0, { scrollTop } = this.list;
    this.wanted = wanted;
    this.list.replaceChildren();
    do this.build(); while (this.list.childElementCount < Math.min(kept, this.rows.length));
    if (kept) this.list.scrollTop = scrollTop; // other layouts of the same list
    this.legend.replaceChildren(...workers.map((name) => make("li", {}, make("span", { class: "swatch", colour: this.colours.get(name) }), name)));
    const more = sets.reduce((sum, [, l]) => sum + l.more, 0), bytes = this.rows.reduce((sum, [, , split]) => sum + split.bytes, 0);
    const left = more ? `, ${more} are too many to send` : "";
    setText(this.note, `${this.rows.length} of ${all.length + more} parameters${left}, ${size(bytes)}; a block is the part of a worker, stripes are copies`);
  }

  // The next parameters of the list.
  build() {
    const from = this.list.childElementCount;
    this.list.append(...this.rows.slice(from, from + BUILT).map(([number, name, split]) => this.row(this.several ? number : -1, { ...split, name }, this.colours)));
  }

  row(number, tensor, colours) {
    const shape = (/\[(.*)\]/.exec(tensor.spec)?.[1] ?? "").split(",").filter(Boolean).map(Number);
    const picture = make("div", { class: "tensor", role: "img", "aria-label": `${tensor.spec} ${tensor.layout}: ${describe(tensor)}` });
    const pieces = new Map(); // box -> workers that have it
    for (const [worker, boxes] of Object.entries(tensor.boxes)) for (const box of boxes) {
      const at = JSON.stringify(box);
      pieces.set(at, [...(pieces.get(at) ?? []), worker]);
    }
    for (const [box, workers] of pieces) picture.append(block(JSON.parse(box), shape, workers.sort(byName), colours));
    return make("li", {}, make("div", { class: "name" }, number >= 0 ? `${number}: ${tensor.name}` : tensor.name),
      make("div", { class: "how" }, `${tensor.spec} ${tensor.layout}${tensor.mesh ? ` ${tensor.mesh}` : ""} · ${size(tensor.bytes)}`), picture);
  }
}

const describe = (tensor) => Object.entries(tensor.boxes).map(([worker, boxes]) => `${worker} has ${boxes.map((box) => box.map(([from, to]) => `${from}:${to}`).join(",")).join(" and ")}`).join("; ");

// A block of a tensor: its first two dims are the picture's height and width. A vector is as wide as it is long.
function block(box, shape, workers, colours) {
  const [tall, wide] = shape.length > 1 ? [0, 1] : [-1, 0];
  const part = (dim) => (dim < 0 || !shape[dim] ? [0, 1] : [box[dim][0] / shape[dim], box[dim][1] / shape[dim]]);
  const [[top, bottom], [left, right]] = [part(tall), part(wide)], element = make("span");
  Object.assign(element.style, { top: `${top * 100}%`, height: `${(bottom - top) * 100}%`, left: `${left * 100}%`, width: `${(right - left) * 100}%` });
  if (workers.length > 1) { // copies: stripes of all colours
    const bands = workers.map((worker, n) => `${colours.get(worker)} ${n * 9}px ${(n + 1) * 9}px`);
    element.style.background = `repeating-linear-gradient(135deg, ${bands.join(", ")})`;
    const names = workers.length > 4 ? `${workers.length} copies` : workers.join(" = ");
    if ((right - left) > 0.2 && bottom - top > 0.3) element.append(make("b", { title: workers.join(" ") }, names));
    return element;
  }
  for (const worker of workers) {
    const stripe = make("i", { colour: colours.get(worker), title: worker }, (right - left) / workers.length > 0.09 && bottom - top > 0.2 ? worker : "");
    stripe.style.color = theme["on-colour"];
    element.append(stripe);
  }
  return element;
}

export class Log extends Panel {
  constructor(follow, changed) {
    super("log");
    this.button = make("button", { type: "button", "aria-pressed": "false" }, "follow");
    this.hold = make("button", { type: "button", "aria-pressed": "false" }, "hold still");
    this.filter = make("input", { type: "search", placeholder: "filter: text of a line, as sharded or train.py:31", "aria-label": "Filter lines" });
    this.lines = make("pre", { tabindex: "0", "aria-label": "Lines of the instruction log" });
    this.section.querySelector(".body").prepend(make("div", { class: "tools" }, this.button, this.hold, this.filter));
    this.content.append(this.lines);
    this.button.addEventListener("click", () => { const on = this.button.getAttribute("aria-pressed") !== "true"; this.button.setAttribute("aria-pressed", on); follow(on); changed(this); });
    this.hold.addEventListener("click", () => { this.hold.setAttribute("aria-pressed", this.hold.getAttribute("aria-pressed") !== "true"); changed(this); });
    this.filter.addEventListener("input", () => changed(this));
    this.shown = "";
  }

  missing(store) {
    if (!store.following) return "The server writes its instruction log for those who follow it: that takes some of its time, so nothing is written until then.";
    return store.log.length ? "" : "No line yet: lines come with the next records of the server, once something is planned.";
  }

  show(store) {
    if (this.hold.getAttribute("aria-pressed") === "true") return;
    const wanted = this.filter.value.toLowerCase(), key = `${store.lines}|${wanted}`;
    if (key === this.shown) return;
    this.shown = key;
    const rows = store.log.filter((line) => line.toLowerCase().includes(wanted)), low = this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 30;
    setText(this.lines, rows.slice(-MAX_LINES).join("\n"));
    if (low) this.lines.scrollTop = this.lines.scrollHeight;
    setText(this.note, `${rows.length} of the last ${store.log.length} lines${store.missed ? `; ${store.missed} were too many to send` : ""}`);
  }
}
