// Line charts in SVG and lanes on a canvas: small, keyed by arrow keys, and told in words to who cannot see them.

const SVG = "http://www.w3.org/2000/svg";
const INSET = { left: 52, right: 10, top: 8, bottom: 22 };

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  const whole = Math.max(0, value < 100 ? value : Math.round(value));
  if (whole < 100) return `${whole.toFixed(whole < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 100 && Math.round(whole % 60) === 0) return `${minutes} min`;
  return minutes < 100 ? `${minutes} min ${Math.round(whole % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((value / (unit === "k" ? 1e3 : limit)).toPrecision(3))} ${unit}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function ticks(low, high, count, clock = false) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (clock && rough > 1 && CLOCK.find((s) => s >= rough)) || [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function made(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export class LineChart {
  // options: title, unit(y), x(x), least and most of y where they are known
  constructor(host, options, say) {
    this.options = options;
    this.say = say;
    this.lines = [];
    this.at = null;
    this.box = document.createElement("section");
    this.box.className = "chart";
    const id = `chart-${options.id}`;
    this.box.innerHTML = `<h2 id="${id}"></h2><p class="key"></p>`;
    this.title();
    this.key = this.box.querySelector(".key");
    this.svg = made("svg", { tabindex: 0, role: "img", "aria-labelledby": id });
    this.box.append(this.svg);
    host.append(this.box);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  title(text = this.options.title) {
    this.named = text;
    if (this.box.firstChild.textContent !== text) this.box.firstChild.textContent = text;
  }

  // lines: [{name, colour, dash, points: [[x, y], …]}]
  update(lines) {
    this.lines = lines.filter((line) => line.points.length);
    this.box.hidden = this.options.optional === true && this.lines.length === 0;
    this.draw();
  }

  range() {
    const xs = [], ys = [];
    for (const line of this.lines) {
      for (const [x, y] of line.points) {
        xs.push(x);
        if (y !== null && Number.isFinite(y)) ys.push(y);
      }
    }
    if (!xs.length || !ys.length) return null;
    ys.sort((a, b) => a - b);
    let low = this.options.least ?? ys[0];
    let high = this.options.most ?? ys[ys.length - 1];
    const usual = ys[Math.floor(0.98 * (ys.length - 1))];
    if (this.options.most === undefined && ys.length > 30 && high - low > 8 * (usual - low) && usual > low) high = low + 2 * (usual - low);
    if (high <= low) high = low + (Math.abs(low) || 1);
    const left = xs.reduce((a, b) => Math.min(a, b)), right = xs.reduce((a, b) => Math.max(a, b));
    return { left, right: Math.max(right, left + 1e-9), low, high };
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    this.svg.replaceChildren();
    this.legend(null);
    const range = (this.scale = width > 60 ? this.range() : null);
    if (!range) {
      if (width > 60) this.svg.append(made("text", { x: 12, y: 30 }, "nothing yet"));
      return;
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const w = width - INSET.left - INSET.right, h = height - INSET.top - INSET.bottom;
    range.x = (x) => INSET.left + (w * (x - range.left)) / (range.right - range.left);
    range.y = (y) => INSET.top + h * (1 - (Math.min(y, range.high) - range.low) / (range.high - range.low));
    for (const y of ticks(range.low, range.high, 4)) {
      this.svg.append(made("line", { class: "grid", x1: INSET.left, x2: width - INSET.right, y1: range.y(y), y2: range.y(y) }));
      this.svg.append(made("text", { x: INSET.left - 6, y: range.y(y) + 4, "text-anchor": "end" }, this.options.unit(y)));
    }
    const across = ticks(range.left, range.right, Math.max(2, Math.floor(width / 110)), this.options.clock());
    for (const x of across) {
      const near = range.x(x) > width - 40 ? "end" : range.x(x) < INSET.left + 20 ? "start" : "middle";
      this.svg.append(made("text", { x: range.x(x), y: height - 5, "text-anchor": near }, this.options.x(x)));
    }
    for (const line of this.lines) {
      let d = "", down = false;
      for (const [x, y] of line.points) {
        if (y === null || !Number.isFinite(y)) { down = false; continue; }
        d += `${down ? "L" : "M"}${range.x(x).toFixed(1)} ${range.y(y).toFixed(1)}`;
        down = true;
      }
      const path = made("path", { d, fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round" });
      path.style.stroke = line.colour;
      if (line.dash) path.setAttribute("stroke-dasharray", line.dash);
      this.svg.append(path);
      if (line.points.length < 25) {
        for (const [x, y] of line.points) {
          if (y === null || !Number.isFinite(y)) continue;
          const dot = made("circle", { cx: range.x(x), cy: range.y(y), r: 2.4 });
          dot.style.fill = line.colour;
          this.svg.append(dot);
        }
      }
    }
    this.cross = made("line", { class: "cross", y1: INSET.top, y2: INSET.top + h, visibility: "hidden" });
    this.svg.append(this.cross);
    const last = this.lines.map((line) => `${line.name} ${this.options.unit(line.points[line.points.length - 1][1])}`);
    this.svg.setAttribute("aria-label", `${this.named}, now: ${last.join(", ")}`);
    this.svg.removeAttribute("aria-labelledby");
    if (this.at !== null) this.move(this.at, false);
  }

  legend(x) {
    this.key.replaceChildren();
    for (const line of this.lines) {
      const item = document.createElement("span"), mark = document.createElement("i");
      mark.style.borderTopColor = line.colour;
      if (line.dash) mark.style.borderTopStyle = "dashed";
      const point = x === null ? line.points[line.points.length - 1] : nearest(line.points, x);
      item.append(mark, `${line.name} ${point ? this.options.unit(point[1]) : "–"}`);
      this.key.append(item);
    }
    if (x !== null) this.key.append(`at ${this.options.x(x)}`);
  }

  move(x, tell = false) {
    this.at = x;
    if (!this.scale || !this.cross) return;
    this.legend(x);
    if (x === null) { this.cross.setAttribute("visibility", "hidden"); return; }
    this.cross.setAttribute("visibility", "visible");
    this.cross.setAttribute("x1", this.scale.x(x));
    this.cross.setAttribute("x2", this.scale.x(x));
    if (tell) this.say(`${this.named}: ${this.key.textContent}`);
  }

  point(event) {
    if (!this.scale) return;
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - INSET.left) / (box.width - INSET.left - INSET.right);
    this.move(this.scale.left + Math.min(1, Math.max(0, share)) * (this.scale.right - this.scale.left));
  }

  press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10 }[event.key];
    if (!this.scale || (by === undefined && !["Home", "End", "Escape"].includes(event.key))) return;
    event.preventDefault();
    if (event.key === "Escape") { this.move(null); return; }
    const { left, right } = this.scale;
    const from = this.at ?? right;
    const to = event.key === "Home" ? left : event.key === "End" ? right : from + (by * (right - left)) / 60;
    this.move(Math.min(right, Math.max(left, to)), true);
  }
}

export function nearest(points, x) {
  let low = 0, high = points.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

export class Lanes {
  // Per worker and stretch of time: stepping, waiting, and below it an exchange under way; marks for deaths and births.
  constructor(host, say) {
    this.say = say;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    host.append(this.canvas);
    this.span = 0; // seconds shown; 0 is all
    this.end = null; // null follows the newest
    this.data = { lanes: [], marks: [], began: 0, now: 1 };
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  update(data) { this.data = data; this.draw(); }

  window() {
    const { began, now } = this.data;
    const span = this.span || Math.max(1e-6, now - began);
    const right = this.span && this.end !== null ? this.end : now;
    return [Math.max(began, right - span), Math.max(right, began + 1e-6)];
  }

  draw() {
    const { lanes, marks, began } = this.data;
    const width = this.canvas.parentElement.clientWidth;
    const high = lanes.length > 24 ? 12 : 20, left = 34, bottom = 20;
    const height = Math.max(1, lanes.length) * high + bottom;
    const dense = window.devicePixelRatio || 1;
    if (width < 60) return;
    this.canvas.width = width * dense;
    this.canvas.height = height * dense;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.scale(dense, dense);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    const [from, to] = this.window();
    const x = (t) => left + ((width - left - 8) * (t - from)) / (to - from);
    const dead = marks.filter((mark) => mark.kind === "lost").map((mark) => [mark.worker, mark.t]);
    const held = colour("held"), step = colour("step"), wait = colour("wait"), exchange = colour("exchange"), quiet = colour("quiet");
    const places = new Map(lanes.map((lane, row) => [lane.worker, row]));
    lanes.forEach((lane, row) => {
      const top = row * high, body = high - 6;
      pen.fillStyle = quiet;
      if (high > 14 || row % 4 === 0) pen.fillText(String(lane.worker), 4, top + high - 5);
      for (let i = 1; i < lane.points.length; i += 1) {
        const [t0, s0, e0, w0] = lane.points[i - 1];
        let [t1, s1, e1, w1] = lane.points[i];
        const death = dead.find(([worker, lost]) => worker === lane.worker && lost >= t0 && lost < t1);
        if (death) t1 = death[1]; // nothing is drawn for the time that it was not there
        if (t1 < from || t0 > to || t1 <= t0) continue;
        const a = Math.floor(Math.max(left, x(t0))), wide = Math.max(1, Math.floor(x(Math.min(t1, to))) - a);
        const stepping = Math.min(1, (s1 - s0) / (t1 - t0)), exchanging = Math.min(1, (e1 - e0) / (t1 - t0));
        pen.fillStyle = wait;
        pen.fillRect(a, top + 1, wide, body);
        const waiting = Math.min(1 - stepping, Math.max(0, (w1 - w0) / (t1 - t0)));
        pen.fillStyle = held;
        pen.fillRect(a, top + 1 + body * (1 - stepping - waiting), wide, body * waiting);
        pen.fillStyle = step;
        pen.fillRect(a, top + 1 + body * (1 - stepping), wide, body * stepping);
        pen.fillStyle = exchange;
        pen.fillRect(a, top + 1 + body, wide * exchanging, 3);
      }
    });
    for (const mark of marks) {
      if (mark.t < from || mark.t > to) continue;
      const at = x(mark.t), row = places.get(mark.worker);
      if (mark.kind === "generation") {
        pen.strokeStyle = colour("gen");
        pen.setLineDash([2, 3]);
        pen.beginPath(); pen.moveTo(at, 0); pen.lineTo(at, height - bottom); pen.stroke();
        pen.setLineDash([]);
      } else if (row !== undefined && ["lost", "failed", "reborn"].includes(mark.kind)) {
        const top = row * high + 1, size = high - 6;
        pen.fillStyle = pen.strokeStyle = colour(mark.kind === "reborn" ? "reborn" : "lost");
        pen.lineWidth = 2.5;
        pen.beginPath();
        if (mark.kind === "reborn") {
          pen.moveTo(at - 5, top + size); pen.lineTo(at + 5, top + size); pen.lineTo(at, top); pen.closePath(); pen.fill();
        } else {
          pen.moveTo(at - 5, top); pen.lineTo(at + 5, top + size); pen.moveTo(at + 5, top); pen.lineTo(at - 5, top + size); pen.stroke();
        }
        pen.lineWidth = 1;
      }
    }
    pen.fillStyle = quiet;
    pen.textAlign = "center";
    for (const t of ticks(from - began, to - began, Math.max(2, Math.floor(width / 120)), true)) pen.fillText(seconds(t), Math.min(width - 30, x(t + began)), height - 6);
    pen.textAlign = "start";
    const lost = marks.filter((mark) => mark.kind === "lost").length;
    this.canvas.setAttribute("aria-label", `Timeline of ${lanes.length} workers, ${seconds(from - began)} to ${seconds(to - began)}; ${lost} losses marked`);
  }

  press(event) {
    const [from, to] = this.window(), span = to - from;
    const keys = { ArrowLeft: -0.25, ArrowRight: 0.25 };
    if (event.key in keys) {
      this.span = this.span || span / 2;
      const moved = (this.end ?? to) + keys[event.key] * this.span;
      this.end = moved >= this.data.now ? null : Math.max(this.data.began + this.span, moved);
    } else if (event.key === "+" || event.key === "=") this.span = Math.max(1, span / 2);
    else if (event.key === "-") this.span = span * 2 >= this.data.now - this.data.began ? 0 : span * 2;
    else if (event.key === "0") { this.span = 0; this.end = null; } else return;
    event.preventDefault();
    this.draw();
    this.say(this.canvas.getAttribute("aria-label"));
  }
}
