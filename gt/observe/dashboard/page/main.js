// The page: takes the server's events into one store, and has a panel drawn in each frame, so that no frame takes long.
import { readTheme } from "./charts.js";
import { seconds, setText } from "./format.js";
import { Curves, Errors, Lines, Memory, Sessions, Tiles, Traffic, Workers } from "./panels.js";
import { Layouts, Log, Pipeline } from "./structure.js";

const MAX_LOG_LINES = 2000;
const store = {
  state: null, samples: [], schedules: new Map(), layouts: new Map(), log: [], lines: 0, missed: 0, following: false, session: -1, problem: "", link: "loading", told: 0,
};

// ---- drawing

const dirty = new Set();
let asked = false;
function draw(...panels) {
  for (const panel of panels) dirty.add(panel);
  if (!asked && dirty.size) { asked = true; requestAnimationFrame(frame); }
}
function frame() {
  asked = false;
  const [panel] = dirty;
  dirty.delete(panel);
  performance.mark("redraw");
  try { panel.update(store); }
  catch (error) { console.error(error); panel.state?.("error", `This panel has failed: ${error.message}`); }
  performance.measure(`redraw ${panel.constructor.name}`, "redraw");
  performance.clearMarks(); // the browser keeps marks for ever
  if (!window.keepMeasures) performance.clearMeasures();
  draw();
}

readTheme();
const panels = [
  new Tiles(), new Pipeline(), new Memory(), new Curves(), new Traffic(draw), new Workers(), new Sessions(), new Layouts(draw), new Lines(), new Errors(), new Log(follow, draw),
];

// ---- events of the server

// The link leads to a proof, which this port's page alone keeps: cookies are sent to all ports of a host.
const entered = /^#proof=([0-9a-f]+)$/.exec(location.hash);
if (entered) {
  localStorage.setItem("proof", entered[1]);
  history.replaceState(null, "", "/");
}

let events = null;
function open() {
  events?.close();
  events = new EventSource(`events?proof=${localStorage.getItem("proof") ?? ""}${store.following ? "&log=1" : ""}`);
  const on = (name, take) => events.addEventListener(name, (event) => take(JSON.parse(event.data)));
  on("history", (samples) => { store.samples = samples; });
  on("sample", (samples) => { store.samples.push(...samples); });
  on("state", (state) => {
    if (store.state && state.server.life !== store.state.server.life) { // another server, whose sessions have the same numbers
      for (const kept of [store.schedules, store.layouts]) kept.clear();
      store.session = -1;
      picker.value = "-1";
    }
    store.state = state;
    const alive = new Set(state.sessions.map((s) => s.number));
    for (const kept of [store.schedules, store.layouts]) for (const number of kept.keys()) if (!alive.has(number)) kept.delete(number);
    listSessions(state.sessions);
    setText(document.getElementById("server"), `${state.server.sharing ?? ""} server, up ${seconds(Math.floor(state.server.at ?? 0))}`);
  });
  on("schedule", (schedule) => { store.schedules.set(schedule.session, schedule); });
  on("layouts", (layouts) => { store.layouts.set(layouts.session, { ...layouts, order: store.told += 1 }); });
  on("log", ({ lines, missed }) => {
    store.log = [...store.log, ...lines].slice(-MAX_LOG_LINES);
    store.lines += lines.length;
    store.missed += missed;
  });
  on("problem", (problem) => { linked(problem ? "lost" : store.state ? "live" : "loading", problem); draw(...panels); });
  events.onopen = () => { // each connection, also one that is made again, begins with all lines that there are
    Object.assign(store, { log: [], lines: store.lines + 1, missed: 0 });
  };
  events.onerror = () => {
    const ended = events.readyState === EventSource.CLOSED;
    linked("lost", ended ? "the dashboard does not know this browser any more: open the link that its terminal shows" : "the dashboard has ended, or cannot be reached; the page tries again");
    draw(...panels);
  };
}

function follow(on) {
  Object.assign(store, { following: on, log: [], lines: store.lines + 1 });
  open();
}

function linked(link, problem) {
  Object.assign(store, { link, problem });
  const pill = document.getElementById("link"), alert = document.getElementById("problem");
  document.body.dataset.link = pill.dataset.link = link;
  setText(pill, { loading: "connecting", live: "live", lost: "no connection" }[link]);
  alert.hidden = !problem;
  setText(alert, problem && store.state ? `The figures are the last known: ${problem}` : problem);
}

// ---- controls

const picker = document.getElementById("session");
function listSessions(sessions) {
  const names = [["-1", "all"], ...sessions.map((s) => [String(s.number), `${s.number} ${s.user} ${s.program}`])];
  if (store.session >= 0 && !sessions.some((s) => s.number === store.session)) names.push([String(store.session), `${store.session} (ended)`]);
  if (names.map(String).join("\n") === picker.dataset.names) return;
  picker.dataset.names = names.map(String).join("\n");
  picker.replaceChildren(...names.map(([value, text]) => new Option(text, value, false, value === String(store.session))));
}
picker.addEventListener("change", () => { store.session = Number(picker.value); draw(...panels); });

const system = matchMedia("(prefers-color-scheme: dark)"), themes = document.getElementById("theme");
themes.value = localStorage.getItem("theme") ?? "auto";
function colours() {
  const chosen = themes.value;
  document.documentElement.dataset.theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
  readTheme();
  draw(...panels);
}
themes.addEventListener("change", () => { localStorage.setItem("theme", themes.value); colours(); });
system.addEventListener("change", colours);

linked("loading", "");
colours();
open();
