// Takes the stream of news in, keeps what it was told, and draws it. What was drawn stays when the server goes away.
import { Lanes, LineChart, seconds, short } from "./charts.js";

const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const runs = []; // by number: {title, head, workers, fragments, marks, series}
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const colour = (n) => `var(${COLOURS[n % COLOURS.length]})`;
const DASHES = [null, "7 3", "2 3", "9 3 2 3", "4 2", "1 3 6 3"]; // so that lines differ without colour too
const dash = (n) => DASHES[n % DASHES.length];
const percent = (value) => (value === null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(value > 0.995 ? 1 : 0)} %`);
const bytes = (value) => `${short(value, 3)}B`;
const say = (text) => { $("told").textContent = text; };

let shown = Number(query.get("run") ?? 0) || 0; // -1: compare
let stream = null, wanted = false, connected = false, heard = 0;
const WATCH_MS = 20000;

const charts = {};
for (const [id, options] of Object.entries({
  loss: { title: "Loss", unit: short, kind: "both" },
  metric: { title: "Metrics of the joint model", unit: short, kind: "both", optional: true },
  rate: { title: "Rows a second", unit: (v) => short(v, 3), kind: "time", least: 0 },
  busy: { title: "Share of the time spent stepping", unit: percent, kind: "time", least: 0, most: 1 },
  wire: { title: "Bytes a second, all workers", unit: bytes, kind: "time", least: 0 },
  fragments: { title: "Fragments: steps until landed, and between averages", unit: (v) => short(v, 3), kind: "fragment", least: 0, optional: true },
})) {
  const across = () => (options.kind === "both" ? $("across").value : options.kind);
  const x = (value) => ({ time: seconds(value), steps: `${short(value, 3)} steps`, fragment: Number.isInteger(value) ? `fragment ${value}` : "" })[across()];
  charts[id] = new LineChart($("charts"), { id, x, clock: () => across() === "time", ...options }, say);
}
const lanes = new Lanes($("lanes"), say);

function take(message) {
  const run = (runs[message.run] ??= { series: {}, marks: [], workers: [], fragments: [], quiet: 0, error: "" });
  if (message.quiet_s !== undefined) { run.quiet = message.quiet_s; run.error = message.error; draw(); return; }
  if (message.fresh) Object.assign(run, { series: {}, marks: [], workers: [], fragments: [] });
  run.title = message.title;
  run.lost = message.lost;
  run.quiet = 0;
  run.head = message.head;
  run.count = message.count;
  for (const name of ["workers", "fragments"]) if (message[name]) run[name] = message[name];
  if (message.marks) { // one that came again takes the place of the line that said the same
    const again = new Set(message.marks.map((mark) => mark.id));
    run.marks = run.marks.filter((mark) => !again.has(mark.id)).concat(message.marks).slice(-400);
  }
  for (const [name, part] of Object.entries(message.series)) {
    const known = run.series[name];
    if (!known || known.v !== part.v) run.series[name] = { v: part.v, p: part.p, last: part.last };
    else { known.p.splice(part.at, known.p.length, ...part.p); known.last = part.last; }
  }
  draw();
}

function connect() {
  if (stream) stream.close();
  const asked = new URLSearchParams({ run: String(Math.max(0, shown)) });
  if (query.has("token")) asked.set("token", query.get("token"));
  const mine = (stream = new EventSource(`stream?${asked}`));
  mine.onmessage = (event) => {
    if (mine !== stream) return;
    connected = true;
    heard = Date.now();
    take(JSON.parse(event.data));
  };
  mine.onerror = () => { // browsers differ in how long they try again, so this page does it itself
    if (mine !== stream) return;
    mine.close();
    connected = false;
    draw();
    setTimeout(() => mine === stream && connect(), 1000);
  };
}

function points(run, name) { // what was folded, and the newest beside it
  const series = run.series[name];
  return !series ? [] : series.last ? [...series.p, series.last] : series.p;
}
function origin(run) { // when workers began to step: what was before is start-up, of machines and not of the training
  return run.head.stepping ?? run.head.began ?? 0;
}
function rates(run, over, column) { // of counters: how fast they grew between two points
  const told = points(run, "total"), began = origin(run), found = [];
  for (let i = 1; i < told.length; i += 1) {
    if (told[i][0] <= began) continue;
    const wide = over === 0 ? told[i][0] - told[i - 1][0] : told[i][over] - told[i - 1][over];
    if (wide > 0) found.push([told[i][0] - began, (told[i][column] - told[i - 1][column]) / wide]);
  }
  return found;
}
function curve(run, name) {
  const began = origin(run), steps = $("across").value === "steps";
  return points(run, name).map(([t, s, v]) => [steps ? s : t - began, v]);
}
const metrics = (run) => Object.keys(run.series).filter((name) => name.startsWith("m:"));

function drawOne(run) {
  const loss = [{ name: "training", colour: colour(0), points: curve(run, "train") }];
  const tried = { "t:best": "best replica", "t:alone": "one worker alone" }; // what Auto compares the joint model with
  const other = [];
  metrics(run).forEach((name) => {
    const line = { name: name.slice(2).replace("val_", "validation "), points: curve(run, name) };
    (name === "m:val_loss" ? loss : other).push(line);
    line.colour = colour((name === "m:val_loss" ? loss : other).length - 1 + (name === "m:val_loss" ? 0 : 2));
    line.dash = dash((name === "m:val_loss" ? loss : other).length - 1);
  });
  for (const [name, title] of Object.entries(tried)) {
    if (points(run, name).length) loss.push({ name: title, colour: colour(loss.length), dash: dash(loss.length), points: curve(run, name) });
  }
  charts.loss.update(loss);
  charts.metric.update(other);
  charts.rate.update([{ name: "all workers", colour: colour(0), points: rates(run, 0, 1) }]);
  charts.busy.update([{ name: "mean of the workers", colour: colour(2), points: rates(run, 5, 4).map(([t, v]) => [t, Math.min(1, v)]) }]);
  charts.wire.update([
    { name: "sent", colour: colour(0), points: rates(run, 0, 2) },
    { name: "received", colour: colour(1), points: rates(run, 0, 3), dash: "5 3" },
  ]);
  charts.fragments.update([
    { name: "between averages", colour: colour(3), dash: "7 3", points: run.fragments.filter((f) => f.period !== undefined).map((f) => [f.fragment, f.period]) },
    { name: "until landed", colour: colour(4), points: run.fragments.filter((f) => f.late !== undefined).map((f) => [f.fragment, f.late]) },
  ]);
  lanes.update({
    lanes: run.workers.map((w) => ({ worker: w.worker, points: points(run, `w:${w.worker}`) })),
    marks: run.marks.filter((mark) => mark.t >= origin(run)), began: origin(run), now: run.head.now ?? 1,
  });
  table(run);
  list(run);
}

function drawAll() { // several runs side by side
  const every = runs.filter(Boolean);
  const per = (make) => every.map((run, n) => ({ name: run.title, colour: colour(n), dash: dash(n), points: make(run) }));
  const held = every.every((run) => metrics(run).includes("m:val_loss"));
  charts.loss.title(held ? "Validation loss" : "Training loss");
  charts.loss.update(per((run) => curve(run, held ? "m:val_loss" : "train")));
  const named = [...new Set(every.flatMap(metrics))].find((name) => name !== "m:val_loss");
  charts.metric.title(named ? named.slice(2).replace("val_", "Validation ") : "Metrics");
  charts.metric.update(named ? per((run) => curve(run, named)) : []);
  charts.wire.title("Bytes a second, sent by all workers");
  charts.rate.update(per((run) => rates(run, 0, 1)));
  charts.busy.update(per((run) => rates(run, 5, 4).map(([t, v]) => [t, Math.min(1, v)])));
  charts.wire.update(per((run) => rates(run, 0, 2)));
  charts.fragments.update([]);
  const names = [...new Set(every.flatMap((run) => Object.keys(run.head.metrics ?? {})))];
  const cells = (tag, texts) => texts.map((text) => { const cell = document.createElement(tag); cell.textContent = text; if (tag === "th") cell.scope = "col"; return cell; });
  $("compared-head").replaceChildren(...cells("th", ["run", "strategy", "workers", "time", "rows", "rows a second", "sent", "lost", ...names]));
  $("compared").replaceChildren(...every.map((run) => {
    const last = points(run, "total").at(-1) ?? [0, 0, 0], took = (run.head.now ?? 0) - (run.head.began ?? 0), row = document.createElement("tr");
    const facts = [run.title, run.head.strategy ?? "", run.head.workers ?? "", seconds(took), short(last[1], 4), short(run.head.rows_per_s, 3), bytes(last[2]), run.lost ?? 0];
    row.append(...cells("td", [...facts, ...names.map((name) => short(run.head.metrics?.[name]))]));
    return row;
  }));
}

function tiles(run) {
  const head = run.head, last = points(run, "total").at(-1) ?? [0, 0, 0, 0, 0, 0];
  const live = run.workers.filter((w) => w.state === "stepping").length;
  const facts = [
    ["rows", short(last[1], 3)],
    ["rows a second", short(run.head.rows_per_s, 3)],
    ["stepping", percent(last[5] > 0 ? Math.min(1, last[4] / last[5]) : NaN)],
    ["sent", bytes(last[2])],
    ["workers", head.state === "ended" ? String(run.workers.length) : `${live} of ${head.workers ?? "?"}`],
    ["lost", String(run.workers.reduce((sum, w) => sum + w.lost, 0))],
    ...Object.entries(head.metrics ?? {}).slice(0, 3).map(([name, value]) => [name.replace("val_", "validation "), short(value)]),
    ...(head.best ? [[`validation loss of the best evaluation, ${head.best.number}`, short(head.best.metrics.val_loss)]] : []),
    ["time", seconds((head.now ?? 0) - (head.began ?? 0))],
  ];
  $("tiles").replaceChildren(...facts.map(([name, value]) => {
    const tile = document.createElement("div"), number = document.createElement("b"), what = document.createElement("span");
    tile.className = "tile";
    number.textContent = value;
    what.textContent = name;
    tile.append(number, what);
    return tile;
  }));
}

function table(run) {
  const now = run.head.now ?? 0;
  const rows = new Map([...$("rows").children].map((row) => [row.dataset.worker, row]));
  const kept = run.workers.map((w) => { // rows stay what they are: a reader's place in them is not lost
    const row = rows.get(String(w.worker)) ?? document.createElement("tr");
    const ago = run.head.state === "ended" ? "" : `${seconds(now - w.seen)} ago`;
    const cells = [w.worker, w.host, w.attempt, w.state, short(w.rows, 6), w.steps, short(w.loss), percent(w.busy), seconds(w.gap_s), bytes(w.sent), bytes(w.received), w.lost, ago];
    cells.forEach((text, n) => {
      const cell = row.children[n] ?? row.appendChild(document.createElement("td"));
      if (cell.textContent !== String(text)) cell.textContent = text;
      if (n === 3) cell.dataset.state = w.state;
    });
    row.dataset.worker = w.worker;
    return row;
  });
  if (kept.length !== $("rows").children.length || kept.some((row, n) => row !== $("rows").children[n])) $("rows").replaceChildren(...kept);
}

function list(run) {
  const began = origin(run), newest = `${run.title} ${run.marks.at(-1)?.n}`;
  if ($("marks").dataset.newest === newest) return;
  $("marks").dataset.newest = newest;
  $("marks").replaceChildren(...run.marks.slice(-200).reverse().map((mark) => {
    const item = document.createElement("li"), when = document.createElement("time"), kind = document.createElement("b");
    item.dataset.kind = mark.kind;
    when.textContent = seconds(Math.max(0, mark.t - began));
    kind.textContent = mark.kind;
    item.append(when, " ", kind, mark.times > 1 ? `${mark.text} (${mark.times} times)` : mark.text);
    return item;
  }));
}

function buttons() {
  const several = runs.filter(Boolean).length > 1;
  const all = several ? [...runs.map((run, n) => [n, run?.title ?? `run ${n}`]), [-1, "Compare"]] : [];
  const key = JSON.stringify([all, shown]);
  if ($("runs").dataset.key === key) return;
  $("runs").dataset.key = key;
  $("runs").replaceChildren(...all.map(([n, title]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    if (n === shown) button.setAttribute("aria-current", "page");
    button.addEventListener("click", () => { shown = n; if (n >= 0) connect(); draw(); });
    return button;
  }));
}

function draw() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => {
    wanted = false;
    const run = runs[Math.max(0, shown)];
    if (!run?.head) return;
    const head = run.head, compares = shown < 0;
    buttons();
    $("title").textContent = compares ? "Runs side by side" : run.title;
    document.title = `${compares ? "compare" : run.title} · thinwire`;
    const state = !connected && head.state !== "ended" ? "away" : run.quiet > 60 && head.state === "running" ? "quiet" : head.state;
    const said = { away: "no connection; trying again", running: "running", ended: "ended", waiting: "nothing yet", quiet: `no news for ${seconds(run.quiet)}: has it died?` };
    const odd = [run.error, head.unread && `${head.unread} events not understood`].filter(Boolean).join("; ");
    $("state").dataset.state = state;
    if ($("state").textContent !== (said[state] ?? state) + (odd && ` (${odd})`)) $("state").textContent = (said[state] ?? state) + (odd && ` (${odd})`);
    const knobs = Object.entries(head.knobs ?? {}).map(([k, v]) => `${k} ${v}`).join(", ");
    $("about").textContent = compares ? "" : [head.strategy && `${head.strategy}${knobs ? ` (${knobs})` : ""}`, head.choice, head.reason, head.best && head.summary?.model && `the model given back is ${head.summary.model === "best" ? `that of evaluation ${head.best.number}, the best` : "the last"}`].filter(Boolean).join(" · ");
    for (const id of ["tiles", "timeline", "workers", "log"]) $(id).hidden = compares;
    $("side").hidden = !compares;
    if (compares) drawAll();
    else {
      for (const chart of Object.values(charts)) chart.title();
      tiles(run);
      drawOne(run);
    }
    document.body.dataset.events = String(run.count ?? 0);
  });
}

$("timeline-key").innerHTML = '<span><i class="box" data-c="--step"></i>stepping</span><span><i class="box" data-c="--held"></i>waiting for a round</span><span><i class="box" data-c="--wait"></i>neither</span><span><i class="box" data-c="--exchange"></i>exchange under way</span><span>✕ lost</span><span>▲ back</span><span>┊ generation</span>';
for (const box of document.querySelectorAll(".box")) box.style.background = `var(${box.dataset.c})`;
for (const [name, span] of [["all", 0], ["10 min", 600], ["1 min", 60]]) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.setAttribute("aria-pressed", String(span === 0));
  button.addEventListener("click", () => {
    lanes.span = span;
    lanes.end = null;
    for (const other of $("ranges").children) other.setAttribute("aria-pressed", String(other === button));
    lanes.draw();
  });
  $("ranges").append(button);
}
$("across").addEventListener("change", draw);
setInterval(() => { // a machine that slept, a network that went: the server tells something every five seconds
  if (connected && Date.now() - heard > WATCH_MS) { connected = false; connect(); draw(); }
}, 5000);
const dark = () => document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").setAttribute("aria-pressed", String(dark()));
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(dark()));
  draw();
});
connect();
