// Curves of one or several runs, overlaid: which metrics, how smooth, on which axes; they grow while the runs train.

import { coalesced, follow, get } from "./api.js";
import { keep, link } from "./app.js";
import { announce, el, field, fill, plural, select } from "./dom.js";
import { chart, style } from "./plot.js";

const FIRST = ["reward", "eval_reward", "loss", "entropy", "response_length", "grad_norm", "logprob_gap", "staleness"];
const MOST_CHARTS = 12; // unless more are chosen
const MOST_POINTS = 3000; // a series that grew beyond this is requested again as a whole
const MOST_RUNS = 16; // as many as the server keeps open

export async function show(page, here) {
  const { run, params } = here;
  const ids = run ? [run] : [...new Set(params.getAll("run"))];
  if (!ids.length) throw new Error("Choose runs in the list first.");
  if (ids.length > MOST_RUNS) throw new Error(`At most ${MOST_RUNS} runs can be overlaid; choose fewer in the list.`);
  const path = run ? `run/${run}/curves` : "curves";
  const answers = await Promise.allSettled(ids.map((id) => get(`/api/runs/${id}`)));
  const lost = answers.filter((one) => one.status === "rejected").map((one) => one.reason);
  let runs = answers.filter((one) => one.status === "fulfilled").map((one) => one.value);
  if (!runs.length) throw lost[0];
  const store = new Map(); // "run name" -> points
  const resets = new Map();
  const charts = new Map();
  let names = params.getAll("name"), smooth = Number(params.get("smooth") ?? 0), log = params.get("log") === "1";
  let automatic = !names.length, keys = [], metrics = [], grown = false, drawList = () => {};
  let unit = params.get("x") === "minute" ? "minute" : "step";
  const hidden = new Set();
  const refresh = coalesced(load, 300);
  list();

  const grid = el("div", { class: "charts" }), empty = el("p", { hidden: true });
  const title = runs.length === 1 ? `Curves of ${runs[0].name}` : `Curves of ${runs.length} runs`;
  const problem = `${plural(lost.length, "run")} cannot be shown: ${lost[0]?.message}`;
  fill(page, el("h1", {}, title), lost.length > 0 && el("p", { class: "problem", role: "alert" }, problem), controls(),
    runs.length > 1 && legend(), picker(), empty, grid);

  /** List all metrics, and choose the first ones unless the user has. */
  function list() {
    keys = [...new Set(runs.flatMap((one) => Object.keys(one.keys)))];
    metrics = [...new Set(runs.flatMap((one) => Object.keys(one.metrics)))].sort();
    if (!automatic) return;
    const parts = metrics.filter((name) => /^rollout\/reward_parts?\//.test(name) && !/\/(min|max)$/.test(name));
    const usual = [...FIRST.filter((key) => keys.includes(key)), ...parts];
    names = (usual.length ? usual : metrics).slice(0, MOST_CHARTS);
  }

  function save() {
    const state = { name: automatic ? null : names, smooth: smooth || null, log: log ? 1 : null, x: unit === "step" ? null : unit };
    keep(path, { run: run ? null : ids, ...state });
  }

  function controls() {
    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smooth, on: { input: () => {
      smooth = Number(slider.value);
      text.textContent = smooth.toFixed(2);
      save();
      draw();
    } } });
    const text = el("span", {}, smooth.toFixed(2));
    const scale = el("input", { type: "checkbox", on: { change: () => ((log = scale.checked), save(), draw()) } });
    scale.checked = log;
    return el("div", { class: "bar" },
      el("label", { class: "field" }, el("span", {}, "Smoothing ", text), slider),
      field("Over", select([["step", "steps"], ["minute", "minutes"]], unit, (value) => ((unit = value), save(), draw()))),
      el("label", { class: "check" }, scale, "Logarithmic"));
  }

  function legend() {
    return el("ul", { class: "legend runs", "aria-label": "Runs" }, runs.map((one, place) => {
      const box = el("input", { type: "checkbox", on: { change: () => {
        box.checked ? hidden.delete(one.id) : hidden.add(one.id);
        draw();
      } } });
      box.checked = true;
      return el("li", {}, el("label", { class: "check" }, box, el("span", { class: `swatch ${style(place).name}` }), label(one)),
        " ", el("a", { href: link(`run/${one.id}`), "aria-label": `Overview of ${one.name}` }, "↗"));
    }));
  }

  /** The name of a run; its path if another one has the same name. */
  function label(one) {
    const same = runs.filter((other) => other.name === one.name).length > 1;
    return same ? one.path : one.name;
  }

  function picker() {
    const choices = el("div", { class: "picker" });
    const search = el("input", { type: "search", on: { input: () => drawList() } });
    const count = el("p", { class: "muted small" });
    drawList = () => {
      const words = search.value.toLowerCase(), focused = document.activeElement?.id;
      const some = [...keys, ...metrics].filter((name) => name.toLowerCase().includes(words));
      const describe = () => (count.textContent = `${some.length} of ${keys.length + metrics.length} metrics, ${names.length} shown`);
      describe();
      fill(choices, some.map((name) => {
        const box = el("input", { type: "checkbox", id: `metric-${name}`, on: { change: async () => {
          automatic = false;
          names = box.checked ? [...names, name] : names.filter((one) => one !== name);
          describe();
          announce(`${name} ${box.checked ? "shown" : "hidden"}`);
          save();
          await refresh();
        } } });
        box.checked = names.includes(name);
        return el("label", { class: "check" }, box, name);
      }));
      if (focused?.startsWith("metric-")) document.getElementById(focused)?.focus();
    };
    drawList();
    return el("details", { class: "metrics" }, el("summary", {}, "Metrics"), field("Search metrics", search), count, choices);
  }

  /** Request what is new of a run; whether there was anything. */
  async function loadRun(one) {
    const wanted = names, after = wanted.map((name) => store.get(`${one.id} ${name}`)?.count ?? 0);
    const answer = await get(`/api/runs/${one.id}/metrics`, { name: wanted, after });
    grown ||= answer.metrics !== Object.keys(one.metrics).length;
    if (resets.has(one.id) && resets.get(one.id) !== answer.resets) {
      for (const key of [...store.keys()]) if (key.startsWith(`${one.id} `)) store.delete(key);
      resets.set(one.id, answer.resets);
      return loadRun(one);
    }
    resets.set(one.id, answer.resets);
    let changed = false;
    for (const [name, points] of Object.entries(answer.series)) {
      const key = `${one.id} ${name}`, old = store.get(key);
      changed ||= !old || points.count !== old.count;
      if (old && points.start === old.count && points.start > 0) {
        for (const part of ["steps", "values", "minutes", "not_finite"]) old[part].push(...points[part]);
        old.count = points.count;
        if (old.steps.length > MOST_POINTS) store.delete(key);
      } else if (points.start === 0) store.set(key, points);
    }
    if (wanted.some((name) => answer.series[name] && !store.has(`${one.id} ${name}`))) return loadRun(one);
    return changed;
  }

  function draw() {
    for (const [name, one] of charts) {
      if (!names.includes(name)) {
        one.close();
        charts.delete(name);
      }
    }
    for (const name of names) {
      if (charts.has(name)) continue;
      charts.set(name, chart(keys.includes(name) ? name.replaceAll("_", " ") : name, "curves"));
      charts.get(name).figure.append(explanation(name));
    }
    const figures = names.map((name) => charts.get(name).figure);
    if (figures.length !== grid.children.length || figures.some((figure, place) => grid.children[place] !== figure)) fill(grid, figures);
    for (const name of names) {
      const lines = runs.flatMap((one, place) => {
        const points = store.get(`${one.id} ${name}`);
        if (!points || hidden.has(one.id)) return [];
        const x = unit === "step" ? points.steps : points.minutes;
        return [{ id: one.id, label: label(one), place, x, y: points.values, missing: points.not_finite }];
      });
      charts.get(name).draw(lines, { smooth, log, unit });
    }
  }

  /** What a metric means, requested when it is opened. */
  function explanation(name) {
    const box = el("details", { on: { toggle: async () => {
      if (!box.open || box.children.length > 1) return;
      const kinds = new Set(runs.map((one) => (one.kind === "experiment" ? "areno run" : "areno train")));
      const all = await get("/api/explain", { name }), fitting = all.filter((one) => kinds.has(one.command));
      const lines = (fitting.length ? fitting : all).map((one) => [
        el("p", {}, el("code", {}, one.name), ` ${one.meaning}${one.unit ? ` (${one.unit})` : ""}`),
        one.normal && el("p", {}, `Normal: ${one.normal}`), one.remedy && el("p", {}, `If not: ${one.remedy}`)]);
      box.append(el("div", {}, all.length ? lines.flat().filter(Boolean) : "This metric is not documented."));
    } } }, el("summary", {}, "What it means"));
    return box;
  }

  async function load() {
    grown = false;
    const changed = await Promise.all(runs.map(loadRun));
    if (grown) { // a metric that was not recorded before, as after the first evaluation
      runs = await Promise.all(runs.map((one) => get(`/api/runs/${one.id}`)));
      list();
      drawList();
      changed.push(...await Promise.all(runs.map(loadRun)));
    }
    empty.hidden = names.length > 0;
    empty.textContent = metrics.length ? "No metrics are chosen." : "No metrics are recorded yet.";
    if (changed.includes(true) || charts.size !== names.length || names.some((name) => !charts.has(name))) draw();
  }

  await load();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  const end = follow(runs.map((one) => one.id), ({ changed }) => (!changed || changed.includes("metrics")) && refresh());
  return () => {
    end();
    dark.removeEventListener("change", draw);
    for (const one of charts.values()) one.close();
  };
}
