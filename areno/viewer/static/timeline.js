// Sessions of an asynchronous run as lanes, colored by the weight version they began with; staleness per step.

import { coalesced, follow, get } from "./api.js";
import { duration, el, fill, number, plural, svg, table, when } from "./dom.js";
import { chart } from "./plot.js";

const LANE = 13, LEFT = 76, TOP = 22, MINIMUM = 640;
const VERSIONS = 6;
const PHASES = ["generate", "reward", "toolcall"];
const STALENESS = ["staleness", "train/staleness_max", "rollout/staleness/max"];

/** Assign each span to the first lane that is free when it begins. */
function packed(spans) {
  const ends = [];
  return spans.map((span) => {
    let lane = ends.findIndex((end) => end <= span.begin);
    if (lane < 0) lane = ends.length;
    ends[lane] = span.end;
    return { span, lane };
  });
}

/** The drawing of a window: concurrent spans in separate lanes, weight updates as lines, and the seconds below. */
class Lanes {
  #shapes = [];
  #y = TOP;

  constructor(data, width) {
    this.data = data;
    this.width = width;
    this.seconds = Math.max(data.end - data.begin, 1e-3);
  }

  draw() {
    const { phases, sessions } = this.data;
    for (const role of new Set(phases.map((phase) => phase.role))) {
      this.#group(role, phases.filter((phase) => phase.role === role), (phase, y) => this.#phase(phase, y));
    }
    this.#group("sessions", sessions, (one, y) => this.#session(one, y));
    const title = `${plural(sessions.length, "session")} and ${plural(phases.length, "phase")} over ${number(this.seconds)} seconds`;
    return svg("svg", { width: this.width, height: this.#y + 18, role: "img", "aria-label": title },
      this.#updates(), this.#shapes, this.#ticks());
  }

  #x(time) {
    const { begin, end } = this.data;
    return LEFT + ((Math.min(Math.max(time, begin), end) - begin) / this.seconds) * (this.width - LEFT - 8);
  }

  #group(text, items, draw) {
    const all = packed(items), height = (Math.max(-1, ...all.map(({ lane }) => lane)) + 1) * LANE;
    if (items.length) this.#shapes.push(svg("text", { x: 0, y: this.#y + 10, class: "label" }, text));
    this.#shapes.push(...all.flatMap(({ span, lane }) => draw(span, this.#y + lane * LANE)));
    this.#y += height + (height ? 6 : 0);
  }

  #bar(item, y, name, title) {
    const x = this.#x(item.begin), width = Math.max(this.#x(item.end) - x, 1);
    return svg("rect", { x, y, width, height: LANE - 3, class: name }, svg("title", {}, title));
  }

  #phase(phase, y) {
    const kind = { update_weights: "update", rollout: "waiting" }[phase.name] ?? "";
    const title = `${phase.name}, step ${phase.step ?? "–"}: ${number(phase.end - phase.begin)} s`;
    return this.#bar(phase, y, `train-phase ${kind}`, title);
  }

  #session(one, y) {
    const names = [...new Set(one.phases.map((phase) => phase.name))];
    const title = `task ${one.task}, session ${one.session}: ${one.status}${one.reason ? ` (${one.reason})` : ""}, ` +
      `began with version ${one.version}, ${number(one.end - one.begin)} s; ` +
      names.map((name) => `${name} ${number(secondsOf(one, name))} s`).join(", ");
    const version = `version-${one.version % VERSIONS}`;
    return [
      this.#bar(one, y, `session ${version} ${one.status}`, title),
      ...one.phases.map((phase) => this.#bar(phase, y, `phase ${PHASES.includes(phase.name) ? phase.name : "other"} ${version}`, title)),
    ];
  }

  #updates() {
    return this.data.versions.filter((one) => one.time >= this.data.begin).flatMap((one) => [
      svg("line", { x1: this.#x(one.time), x2: this.#x(one.time), y1: TOP - 4, y2: this.#y, class: "version-line" }),
      svg("text", { x: this.#x(one.time) + 2, y: 10, class: "label" }, `v${one.version}`)]);
  }

  #ticks() {
    return [0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", {
      x: LEFT + part * (this.width - LEFT - 8), y: this.#y + 12, class: "label", "text-anchor": part === 1 ? "end" : "start",
    }, `${number(part * this.seconds)} s`));
  }
}

/** Seconds that a session spent in phases with this name. */
function secondsOf(session, name) {
  return session.phases.filter((phase) => phase.name === name).reduce((sum, phase) => sum + phase.end - phase.begin, 0);
}

function colorLegend(data) {
  const seen = [...new Set(data.sessions.map((one) => one.version))].sort((a, b) => a - b);
  const sample = (name, text) => el("li", {}, el("span", { class: `swatch ${name}` }), text);
  return [
    seen.slice(0, VERSIONS * 2).map((version) => sample(`version-${version % VERSIONS}`, `began with version ${version}`)),
    sample("update", "weight update"),
    el("li", {}, "full height: generation; lower half: reward; upper half: tool call; pale: waiting, or a rollout phase of the trainer"),
  ];
}

function sessionTable(data) {
  const heads = ["Task / session", "Version", "Outcome", "Begin (s)", "Duration (s)", "Generating (s)", "Reward (s)", "Tools (s)"];
  return table("Sessions", heads, data.sessions.map((one) => [
    `${one.task} / ${one.session}`, String(one.version), one.status, number(one.begin - data.begin), number(one.end - one.begin),
    ...PHASES.map((name) => number(secondsOf(one, name)))]));
}

function stalenessLines(series) {
  return Object.entries(series).map(([name, points]) => ({
    id: name, label: name === "staleness" ? "mean" : "maximum", place: name === "staleness" ? 0 : 1,
    x: points.steps, y: points.values, missing: points.not_finite }));
}

export async function show(page, { run }) {
  const timeline = new Timeline(run);
  fill(page, el("h1", {}, "Timeline"), timeline.elements());
  return timeline.start();
}

class Timeline {
  #until = null;
  #latest = null;
  #later = []; // the windows after this one
  #drawing = el("div", { class: "wide timeline", tabindex: "0", role: "region", "aria-label": "Timeline" });
  #note = el("p");
  #legend = el("ul", { class: "legend", "aria-label": "Colors" });
  #rows = el("details");
  #earlierButton = el("button", { on: { click: () => this.#earlier() } }, "Earlier");
  #laterButton = el("button", { on: { click: () => this.#open(this.#later.pop() ?? null) } }, "Later");
  #staleness = chart("staleness (weight versions)", "timeline");
  #lanes = el("section", { "aria-label": "Lanes" }, el("div", { class: "bar" }, this.#earlierButton, this.#laterButton),
    this.#note, this.#legend, this.#drawing, this.#rows);
  #curve = el("section", { "aria-label": "Staleness" }, el("h2", {}, "Staleness per step"), this.#staleness.figure);
  #missing = el("p", { hidden: true }, "This run has no traces yet. A run records traces if it is started with ",
    el("code", {}, "--trace"), " (areno train; records only phases) or with ",
    el("code", {}, "perf_tracer.enabled=true perf_tracer.session_tracer.enabled=true"), " (areno run; a session appears when it has ended).");

  constructor(run) {
    this.run = run;
  }

  elements() {
    return [this.#missing, this.#lanes, this.#curve];
  }

  /** Draw, and follow the run while its end is shown; returns a function that stops following. */
  async start() {
    await this.#load();
    const resize = () => this.#latest?.traced && this.#draw();
    window.addEventListener("resize", resize);
    const refresh = coalesced(async () => this.#until === null && this.#load(), 1000);
    const end = follow([this.run], ({ changed }) =>
      (!changed || changed.includes("timeline") || changed.includes("metrics")) && refresh());
    return () => {
      end();
      window.removeEventListener("resize", resize);
      this.#staleness.close();
    };
  }

  #earlier() {
    this.#later.push(this.#until);
    return this.#open(this.#latest.earlier);
  }

  #open(until) {
    this.#until = until;
    return this.#load();
  }

  async #load() {
    const until = this.#until, data = await get(`/api/runs/${this.run}/timeline`, { until });
    if (until !== this.#until) return; // another window was chosen meanwhile
    this.#latest = data;
    this.#missing.hidden = data.traced;
    this.#lanes.hidden = !data.traced;
    if (data.traced) {
      this.#draw();
      this.#describe(data);
    }
    const lines = stalenessLines((await get(`/api/runs/${this.run}/metrics`, { name: STALENESS })).series);
    this.#curve.hidden = !lines.length;
    if (lines.length) this.#staleness.draw(lines, { smooth: 0, log: false, unit: "step" });
  }

  #draw() {
    fill(this.#drawing, new Lanes(this.#latest, Math.max(this.#drawing.clientWidth, MINIMUM)).draw());
  }

  #describe(data) {
    fill(this.#legend, colorLegend(data));
    fill(this.#note, `${when(data.begin)}, ${duration(data.end - data.begin)}: ${plural(data.sessions.length, "session")}. Each vertical line marks a weight update.`,
      data.left_out ? " The first phases of this window are not shown, because there are too many phases." : "");
    fill(this.#rows, el("summary", {}, "Sessions as a table"), sessionTable(data));
    this.#earlierButton.disabled = data.earlier === null;
    this.#laterButton.disabled = this.#until === null;
  }
}
