// Sessions of an asynchronous run as lanes, colored by the weight version they began with; staleness per step.

import { coalesced, follow, get } from "./api.js";
import { duration, el, fill, number, svg, table, when } from "./dom.js";
import { chart } from "./plot.js";

const LANE = 13, LEFT = 76, TOP = 22, MINIMUM = 640;
const VERSIONS = 6;

/** Give each span the first lane that is free at its begin. */
function packed(spans) {
  const ends = [];
  return spans.map((span) => {
    let lane = ends.findIndex((end) => end <= span.begin);
    if (lane < 0) lane = ends.length;
    ends[lane] = span.end;
    return { span, lane };
  });
}

export async function show(page, { run }) {
  let until = null, latest = null;
  const later = [];
  const drawing = el("div", { class: "wide timeline", tabindex: "0", role: "region", "aria-label": "Timeline" });
  const note = el("p"), legend = el("ul", { class: "legend", "aria-label": "Colors" }), rows = el("details");
  const earlierButton = el("button", { on: { click: () => (later.push(until), (until = latest.earlier), load()) } }, "Earlier");
  const laterButton = el("button", { on: { click: () => ((until = later.pop() ?? null), load()) } }, "Later");
  const staleness = chart("staleness (weight versions)", "timeline");
  const lanes = el("section", { "aria-label": "Lanes" }, el("div", { class: "bar" }, earlierButton, laterButton), note, legend, drawing, rows);
  const curve = el("section", { "aria-label": "Staleness" }, el("h2", {}, "Staleness per step"), staleness.figure);
  const missing = el("p", { hidden: true }, "This run has no traces yet. Sessions appear after they have ended, if the run was started with ",
    el("code", {}, "--trace"), " (areno train) or ",
    el("code", {}, "perf_tracer.enabled=true perf_tracer.session_tracer.enabled=true"), " (areno run).");
  fill(page, el("h1", {}, "Timeline"), missing, lanes, curve);

  function bar(item, x, y, name, title) {
    const left = x(item.begin), width = Math.max(x(item.end) - left, 1);
    return svg("rect", { x: left, y, width, height: LANE - 3, class: name }, svg("title", {}, title));
  }

  function group(text, items, y, x, draw) {
    const all = packed(items), height = (Math.max(-1, ...all.map(({ lane }) => lane)) + 1) * LANE;
    const label = items.length > 0 && svg("text", { x: 0, y: y + 10, class: "label" }, text);
    return [[label, all.map(({ span, lane }) => draw(span, y + lane * LANE))].flat(2).filter(Boolean), y + height + (height ? 6 : 0)];
  }

  function session(one, y, x) {
    const seconds = (list) => list.reduce((sum, phase) => sum + phase.end - phase.begin, 0);
    const names = [...new Set(one.phases.map((phase) => phase.name))];
    const title = `task ${one.task}, session ${one.session}: ${one.status}${one.reason ? ` (${one.reason})` : ""}, began with version ${one.version}, ` +
      `${number(one.end - one.begin)} s; ` + names.map((name) => `${name} ${number(seconds(one.phases.filter((phase) => phase.name === name)))} s`).join(", ");
    return [
      bar(one, x, y, `session version-${one.version % VERSIONS} ${one.status}`, title),
      ...one.phases.map((phase) => bar(phase, x, y, `phase ${["generate", "reward", "toolcall"].includes(phase.name) ? phase.name : "other"} version-${one.version % VERSIONS}`, title)),
    ];
  }

  function draw(data) {
    const width = Math.max(drawing.clientWidth, MINIMUM);
    const span = Math.max(data.end - data.begin, 1e-3);
    const x = (time) => LEFT + ((Math.min(Math.max(time, data.begin), data.end) - data.begin) / span) * (width - LEFT - 8);
    const shapes = [];
    let y = TOP;
    for (const role of [...new Set(data.phases.map((phase) => phase.role))]) {
      const [marks, below] = group(role, data.phases.filter((phase) => phase.role === role), y, x, (phase, at) =>
        bar(phase, x, at, `train-phase ${{ update_weights: "update", rollout: "waiting" }[phase.name] ?? ""}`,
          `${phase.name}, step ${phase.step ?? "–"}: ${number(phase.end - phase.begin)} s`));
      shapes.push(...marks);
      y = below;
    }
    const [marks, below] = group("sessions", data.sessions, y, x, (one, at) => session(one, at, x));
    shapes.push(...marks);
    y = below;
    const lines = data.versions.filter((one) => one.time >= data.begin).map((one) => [
      svg("line", { x1: x(one.time), x2: x(one.time), y1: TOP - 4, y2: y, class: "version-line" }),
      svg("text", { x: x(one.time) + 2, y: 10, class: "label" }, `v${one.version}`)]);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", {
      x: LEFT + part * (width - LEFT - 8), y: y + 12, class: "label", "text-anchor": part === 1 ? "end" : "start" }, `${number(part * span)} s`));
    const title = `${data.sessions.length} sessions and ${data.phases.length} phases over ${number(span)} seconds`;
    fill(drawing, svg("svg", { width, height: y + 18, role: "img", "aria-label": title }, lines.flat(), shapes, ticks));
  }

  function describe(data) {
    const seen = [...new Set(data.sessions.map((one) => one.version))].sort((a, b) => a - b);
    const sample = (name, text) => el("li", {}, el("span", { class: `swatch ${name}` }), text);
    fill(legend, seen.slice(0, VERSIONS * 2).map((version) => sample(`version-${version % VERSIONS}`, `began with version ${version}`)),
      sample("update", "weight update"), el("li", {}, "full height: generating; lower half: reward; upper half: tool call; pale: waiting, and rollout phases of the trainer"));
    fill(note, `${when(data.begin)}, ${duration(data.end - data.begin)}: ${data.sessions.length} sessions. A vertical line marks new weights.`);
    const cells = data.sessions.slice(-100).map((one) => [`${one.task} / ${one.session}`, String(one.version), one.status, number(one.begin - data.begin),
      number(one.end - one.begin), ...["generate", "reward", "toolcall"].map((name) =>
        number(one.phases.filter((phase) => phase.name === name).reduce((sum, phase) => sum + phase.end - phase.begin, 0)))]);
    fill(rows, el("summary", {}, "Sessions as a table"), table("Sessions",
      ["Task / session", "Version", "Outcome", "Begin (s)", "Duration (s)", "Generating (s)", "Reward (s)", "Tools (s)"], cells));
  }

  async function load() {
    const asked = until, data = await get(`/api/runs/${run}/timeline`, { until });
    if (asked !== until) return; // another window was chosen meanwhile
    latest = data;
    missing.hidden = data.traced;
    lanes.hidden = !data.traced;
    if (data.traced) {
      draw(data);
      describe(data);
      earlierButton.disabled = data.earlier === null;
      laterButton.disabled = until === null;
    }
    const answer = await get(`/api/runs/${run}/metrics`, { name: ["staleness", "train/staleness_max", "rollout/staleness/max"] });
    const named = Object.entries(answer.series).map(([name, points]) => ({
      id: name, label: name === "staleness" ? "mean" : "maximum", place: name === "staleness" ? 0 : 1,
      x: points.steps, y: points.values, missing: points.not_finite }));
    curve.hidden = !named.length;
    if (named.length) staleness.draw(named, { smooth: 0, log: false, unit: "step" });
  }

  await load();
  const resize = () => latest?.traced && draw(latest);
  window.addEventListener("resize", resize);
  const refresh = coalesced(async () => until === null && load(), 1000);
  const end = follow([run], ({ changed }) => (!changed || changed.includes("timeline") || changed.includes("metrics")) && refresh());
  return () => {
    end();
    window.removeEventListener("resize", resize);
    staleness.close();
  };
}
