// Drawing on canvases: curves, stacked areas, a Gantt chart, a matrix. Knows figures and colours, no panel.
import { make, number } from "./format.js";

export const theme = {};

// Colours of the style sheet, read once for each theme.
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of ["text", "quiet", "grid", "wait", "panel", "accent", "heat", "bad", "on-colour"]) theme[name] = colour(name);
  for (const letter of "FBIWLRO") theme[letter] = colour(`act-${letter}`);
  for (const use of ["weights", "optimizer", "gradients", "activations", "other"]) theme[use] = colour(`use-${use}`);
  theme.dark = document.documentElement.dataset.theme === "dark";
}

const FIRST = { light: ["#2f78d6", "#d9822b", "#3d9a63", "#8459c4", "#c03f83", "#2f8fa3", "#a3811a", "#66758a"], dark: ["#5b9df0", "#f0a445", "#5cbd85", "#a985e6", "#e06aa6", "#5cbccf", "#cfae4b", "#93a2b6"] };

// The colour of a worker: chosen ones, then hues by the golden angle, so that neighbours differ.
export function workerColour(index) {
  const chosen = FIRST[theme.dark ? "dark" : "light"];
  if (index < chosen.length) return chosen[index];
  const light = theme.dark ? 62 : 46 - (index % 3) * 4;
  return `hsl(${Math.round((212 + index * 137.508) % 360)} ${theme.dark ? 58 : 62}% ${light}%)`;
}

// A canvas as wide as its place. `draw(context, width, height)` draws it; `reading(x, y)` is the text for a point. `fit(width)`,
// if there is one, gives it the height for a width.
export class Chart {
  constructor(height, label) {
    this.height = height;
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.canvas.style.height = `${height}px`;
    this.reader = make("output", { class: "reading", "data-hint": "Point at the chart, or use the arrow keys in it, for its figures." });
    this.visible = true;
    this.width = 0;
    watcher.observe(this.canvas);
    sizes.observe(this.canvas);
    this.canvas.chart = this;
    const leave = () => { if (this.at !== undefined || this.chosen) { this.at = this.chosen = undefined; this.redraw(); } this.reader.textContent = ""; };
    this.canvas.addEventListener("pointerleave", leave);
    this.canvas.addEventListener("blur", leave);
    const read = (event) => this.point(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", read);
    this.canvas.addEventListener("pointerdown", read);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  resize(height) {
    if (height !== this.height) {
      this.height = height;
      this.canvas.style.height = `${height}px`;
    }
  }

  redraw() {
    if (this.visible) this.paint();
  }

  paint() {
    if (!this.width || !this.draw) return;
    this.fit?.(this.width);
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const [w, h] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const c = (this.context ??= this.canvas.getContext("2d"));
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    this.draw(c, this.width, this.height);
  }

  point(x, y) {
    const text = this.reading ? this.reading(x, y) : "";
    if (text !== undefined && this.reader.textContent !== text) this.reader.textContent = text;
  }

  key(event) {
    if (this.step && ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
      event.preventDefault();
      const text = this.step(event.key);
      if (text !== undefined) this.reader.textContent = text;
      this.redraw();
    }
  }
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.chart.visible = isIntersecting;
    if (isIntersecting) target.chart.redraw();
  }
}, { rootMargin: "120px" });
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (Math.abs(target.chart.width - contentRect.width) < 1) continue;
    target.chart.width = contentRect.width;
    target.chart.paint(); // out of sight too: a picture or a print of the page would show the old drawing, stretched
  }
});

// Places of n samples by time; a step of a chart by the keys.
export function timeScale(times, width) {
  const [first, last] = [times[0], times[times.length - 1]];
  const span = Math.max(last - first, 1e-9);
  return (at) => ((at - first) / span) * (width - 2) + 1;
}

export function nearest(times, x, width) {
  const scale = timeScale(times, width);
  let best = 0;
  for (let n = 1; n < times.length; n += 1) if (Math.abs(scale(times[n]) - x) < Math.abs(scale(times[best]) - x)) best = n;
  return best;
}

export function move(place, count, key) {
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (key === "ArrowLeft") return Math.max(0, Math.min(place, count) - 1);
  return key === "ArrowRight" ? Math.min(count - 1, place + 1) : Math.min(place, count - 1);
}

function base(c, width, height) {
  c.strokeStyle = theme.grid;
  c.lineWidth = 1;
  c.beginPath();
  for (const y of [0.5, Math.round(height / 2) + 0.5, height - 0.5]) { c.moveTo(0, y); c.lineTo(width, y); }
  c.stroke();
}

export function drawCursor(c, x, height) {
  c.strokeStyle = theme.quiet;
  c.beginPath(); c.moveTo(Math.round(x) + 0.5, 0); c.lineTo(Math.round(x) + 0.5, height); c.stroke();
}

// A curve of values by time, a rate from zero up; null is a gap.
export function curve(c, width, height, times, values, colour, fromZero) {
  base(c, width, height);
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!(high >= low)) return;
  if (fromZero && low >= 0) low = 0;
  // Halves, because a difference may be beyond all numbers. A flat curve is in the middle, away from its label.
  const flat = high === low, span = high / 2 - low / 2 || 1, top = 15, room = height - top - 4, scale = timeScale(times, width);
  const share = (value) => (flat ? 0.5 : (value / 2 - low / 2) / span);
  c.strokeStyle = colour; c.lineWidth = 1.75; c.lineJoin = "round";
  c.beginPath();
  let open = false;
  values.forEach((value, n) => {
    if (value === null) { open = false; return; }
    const x = scale(times[n]), y = top + room - share(value) * room;
    open ? c.lineTo(x, y) : c.moveTo(x, y);
    if (!open && (n + 1 === values.length || values[n + 1] === null)) c.lineTo(x + 1, y);
    open = true;
  });
  c.stroke();
  c.fillStyle = theme.quiet;
  c.textBaseline = "top"; c.textAlign = "left"; c.fillText(number(high), 1, 1);
  c.textBaseline = "bottom"; if (!flat) c.fillText(number(low), 1, height - 2);
}

// Layers of bytes above one another; top: the largest sum.
export function areas(c, width, height, times, layers, top) {
  base(c, width, height);
  const scale = timeScale(times, width), under = new Array(times.length).fill(0), xs = times.map(scale);
  for (const [values, colour] of layers) {
    if (!values.some(Boolean)) continue;
    c.fillStyle = colour;
    c.beginPath();
    for (let n = 0; n < times.length; n += 1) {
      const y = height - ((under[n] + values[n]) / top) * (height - 3);
      n ? c.lineTo(xs[n], y) : c.moveTo(xs[n], y);
    }
    for (let n = times.length - 1; n >= 0; n -= 1) { c.lineTo(xs[n], height - (under[n] / top) * (height - 3)); under[n] += values[n]; }
    c.closePath(); c.fill();
  }
}

export const letter = (action) => /[A-Z]/.exec(action)?.[0] ?? "";

// A long name with its end: names of workers differ there.
export const abbreviated = (name, most) => { const parts = [...name]; return parts.length > most ? `${parts.slice(0, 2).join("")}…${parts.slice(3 - most).join("")}` : name; };

export const AXIS = 20; // height of a time axis

// Marks of a time axis below a chart, at round times.
function axis(c, scale, y, width, left, end, say) {
  const about = end / Math.max(4, Math.floor((width - left) / 110)), power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= about);
  c.fillStyle = theme.quiet; c.strokeStyle = theme.grid; c.lineWidth = 1; c.textBaseline = "top"; c.textAlign = "center";
  c.beginPath();
  for (let at = 0; at <= end * 1.0001; at += step) {
    const x = Math.round(scale(at)) + 0.5;
    c.moveTo(x, 0); c.lineTo(x, y + 3);
    if (x < width - 18) c.fillText(at ? say(at) : "0", x, y + 5);
  }
  c.stroke();
}

// Lanes of a Gantt chart: [name, measured actions, predicted actions], with their times in seconds.
export function gantt(c, width, lanes, shape, chosen) {
  const { left, lane, end, say } = shape, scale = (at) => left + (at / end) * (width - left - 2);
  lanes.forEach(([name, ran, planned], n) => {
    const y = n * lane + 4, tall = planned.length ? Math.round((lane - 8) * 0.66) : lane - 8;
    c.fillStyle = theme.text; c.textAlign = "left"; c.textBaseline = "middle";
    c.fillText(abbreviated(name, 7), 0, y + tall / 2);
    c.fillStyle = theme.wait;
    c.fillRect(left, y, width - left - 2, tall);
    bars(c, ran, scale, y, tall, true);
    if (planned.length) {
      c.globalAlpha = 0.55;
      bars(c, planned, scale, y + tall + 1, lane - 9 - tall, false);
      c.globalAlpha = 1;
    }
    if (chosen && chosen.lane === n && ran[chosen.at]) {
      const [, from, to] = ran[chosen.at];
      c.strokeStyle = theme.text; c.lineWidth = 2;
      c.strokeRect(scale(from), y - 1, Math.max(2, scale(to) - scale(from)), tall + 2);
    }
  });
  c.globalCompositeOperation = "destination-over";
  axis(c, scale, lanes.length * lane, width, left, end, say);
  c.globalCompositeOperation = "source-over";
}

function bars(c, actions, scale, y, tall, named) {
  const wide = [];
  for (const action of actions) {
    const [name, from, to] = action, x = scale(from), w = Math.max(1, scale(to) - x - 0.5);
    c.fillStyle = theme[letter(name)] ?? theme.quiet;
    c.fillRect(x, y, w, tall);
    if (named && w > 9 + 6 * name.length && tall >= 11) wide.push([name, x + w / 2]);
  }
  if (!wide.length) return;
  c.fillStyle = theme["on-colour"]; c.textAlign = "center"; c.textBaseline = "middle";
  for (const [name, x] of wide) c.fillText(name, x, y + tall / 2 + 0.5);
}

// Cells by the share of the largest value.
export function matrix(c, names, values, most, shape, chosen) {
  const { left, top, cell, say } = shape;
  c.textBaseline = "middle";
  names.forEach((name, row) => {
    const short = abbreviated(name, 9);
    c.fillStyle = theme.quiet; c.textAlign = "right";
    if (cell >= 9) c.fillText(short, left - 5, top + row * cell + cell / 2);
    if (cell >= 9) {
      c.save(); c.translate(left + row * cell + cell / 2, top - 4); c.rotate(-Math.PI / 4); c.textAlign = "left";
      c.fillText(short, 0, 0); c.restore();
    }
    names.forEach((_, column) => {
      const value = values[row][column];
      c.fillStyle = row === column ? "transparent" : value ? `rgba(${theme.heat}, ${0.18 + 0.82 * Math.sqrt(value / most)})` : theme.wait;
      c.fillRect(left + column * cell, top + row * cell, cell - 1, cell - 1);
      if (value && cell >= 38) {
        c.fillStyle = Math.sqrt(value / most) > 0.5 ? theme["on-colour"] : theme.text; c.textAlign = "center";
        c.fillText(say(value), left + column * cell + cell / 2, top + row * cell + cell / 2, cell - 4);
      }
    });
  });
  if (chosen) {
    c.strokeStyle = theme.text; c.lineWidth = 2;
    c.strokeRect(left + chosen.column * cell - 0.5, top + chosen.row * cell - 0.5, cell, cell);
  }
}
