// Overlaid curves of one or several runs, with a choice of metrics, smoothing and axes; they grow while the runs train.

import { coalesced, follow, get } from "./api.js";
import { keep, link } from "./app.js";
import { announce, el, field, fill, leftOut, plural, select } from "./dom.js";
import { chart, style } from "./plot.js";

const FIRST = ["reward", "eval_reward", "loss", "entropy", "response_length", "grad_norm", "logprob_gap", "staleness"];
const MOST_CHARTS = 12; // unless more are chosen
const MOST_POINTS = 3000; // a series that grew beyond this is requested again as a whole
const MOST_RUNS = 16; // as many as the server keeps open
const NEW = "0"; // the cursor of a series without any points yet

export async function show(page, { run, params }) {
  const ids = run ? [run] : [...new Set(params.getAll("run"))];
  if (!ids.length) throw new Error("Choose runs in the list first.");
  if (ids.length > MOST_RUNS) throw new Error(`At most ${MOST_RUNS} runs can be overlaid; choose fewer runs in the list.`);
  const answers = await Promise.allSettled(ids.map((id) => get(`/api/runs/${id}`)));
  const lost = answers.filter((one) => one.status === "rejected").map((one) => one.reason);
  const runs = answers.filter((one) => one.status === "fulfilled").map((one) => one.value);
  if (!runs.length) throw lost[0];
  const state = run ? { path: `run/${run}/curves`, run: null } : { path: "curves", run: ids };
  const curves = new Curves(runs, state, params);
  const title = runs.length === 1 ? `Curves of ${runs[0].name}` : `Curves of ${runs.length} runs`;
  const problem = `${plural(lost.length, "run")} cannot be shown: ${lost[0]?.message}`;
  fill(page, el("h1", {}, title), lost.length > 0 && el("p", { class: "problem", role: "alert" }, problem), curves.elements());
  return curves.start();
}

/** The points of the metrics of runs; after the first request only new points are requested. */
class Points {
  #store = new Map(); // "run name" -> points

  get(run, name) {
    return this.#store.get(`${run.id} ${name}`);
  }

  /** Request new points of some metrics of a run; returns the answer and whether anything changed. */
  async load(run, names) {
    const after = names.map((name) => this.get(run, name)?.next ?? NEW);
    const answer = await get(`/api/runs/${run.id}/metrics`, { name: names, after });
    const changed = names.map((name) => this.#add(`${run.id} ${name}`, answer.series[name])).some(Boolean);
    const isLarge = names.some((name) => answer.series[name] && !this.get(run, name));
    return isLarge ? this.load(run, names) : { answer, changed };
  }

  #add(key, points) {
    const old = this.#store.get(key);
    if (!points) return this.#store.delete(key);
    if (points.start === 0) this.#store.set(key, points);
    else if (old) {
      for (const part of ["steps", "values", "minutes", "not_finite"]) old[part].push(...points[part]);
      old.next = points.next;
      if (old.steps.length > MOST_POINTS) this.#store.delete(key);
    }
    return points.start === 0 || points.values.length > 0;
  }
}

class Curves {
  #points = new Points();
  #charts = new Map(); // by name
  #hidden = new Set(); // ids of runs
  #keys = [];
  #metrics = [];
  #grid = el("div", { class: "charts" });
  #empty = el("p", { hidden: true });
  #unread = el("div");
  #refresh = coalesced(() => this.#load(), 300);
  #drawChoices = () => {};

  constructor(runs, state, params) {
    this.runs = runs;
    this.state = state;
    this.names = params.getAll("name");
    this.isAutomatic = !this.names.length;
    this.smooth = Number(params.get("smooth") ?? 0);
    this.log = params.get("log") === "1";
    this.unit = params.get("x") === "minute" ? "minute" : "step";
    this.#list();
  }

  elements() {
    return [this.#controls(), this.runs.length > 1 && this.#legend(), this.#picker(), this.#unread, this.#empty, this.#grid];
  }

  /** Draw, and follow the runs; returns a function that stops following. */
  async start() {
    await this.#load();
    const dark = matchMedia("(prefers-color-scheme: dark)"), draw = () => this.#draw();
    dark.addEventListener("change", draw);
    const ids = this.runs.map((one) => one.id);
    const end = follow(ids, ({ changed }) => (!changed || changed.includes("metrics")) && this.#refresh());
    return () => {
      end();
      dark.removeEventListener("change", draw);
      for (const one of this.#charts.values()) one.close();
    };
  }

  /** List all metrics, and choose the first ones unless the user has chosen. */
  #list() {
    this.#keys = [...new Set(this.runs.flatMap((one) => Object.keys(one.keys)))];
    this.#metrics = [...new Set(this.runs.flatMap((one) => Object.keys(one.metrics)))].sort();
    if (!this.isAutomatic) return;
    const parts = this.#metrics.filter((name) => /^rollout\/reward_parts?\//.test(name) && !/\/(min|max)$/.test(name));
    const usual = [...FIRST.filter((key) => this.#keys.includes(key)), ...parts];
    this.names = (usual.length ? usual : this.#metrics).slice(0, MOST_CHARTS);
  }

  #save() {
    keep(this.state.path, { run: this.state.run, name: this.isAutomatic ? null : this.names, smooth: this.smooth || null,
      log: this.log ? 1 : null, x: this.unit === "step" ? null : this.unit });
  }

  #set(changes) {
    Object.assign(this, changes);
    this.#save();
    this.#draw();
  }

  #controls() {
    const text = el("span", {}, this.smooth.toFixed(2));
    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: this.smooth, on: { input: () => {
      this.#set({ smooth: Number(slider.value) });
      text.textContent = this.smooth.toFixed(2);
    } } });
    const scale = el("input", { type: "checkbox", on: { change: () => this.#set({ log: scale.checked }) } });
    scale.checked = this.log;
    return el("div", { class: "bar" },
      el("label", { class: "field" }, el("span", {}, "Smoothing ", text), slider),
      field("Horizontal axis", select([["step", "steps"], ["minute", "minutes"]], this.unit, (unit) => this.#set({ unit }))),
      el("label", { class: "check" }, scale, "Logarithmic scale"));
  }

  #legend() {
    return el("ul", { class: "legend runs", "aria-label": "Runs" }, this.runs.map((one, place) => {
      const box = el("input", { type: "checkbox", on: { change: () => {
        box.checked ? this.#hidden.delete(one.id) : this.#hidden.add(one.id);
        this.#draw();
      } } });
      box.checked = true;
      return el("li", {}, el("label", { class: "check" }, box, el("span", { class: `swatch ${style(place).name}` }), this.#label(one)),
        " ", el("a", { href: link(`run/${one.id}`), "aria-label": `Overview of ${one.name}` }, "↗"));
    }));
  }

  /** The name of a run; its path if another one has the same name. */
  #label(one) {
    const same = this.runs.filter((other) => other.name === one.name).length > 1;
    return same ? one.path : one.name;
  }

  #picker() {
    const choices = el("div", { class: "picker" }), count = el("p", { class: "muted small" });
    const search = el("input", { type: "search", on: { input: () => this.#drawChoices() } });
    this.#drawChoices = () => {
      const all = [...this.#keys, ...this.#metrics];
      const some = all.filter((name) => name.toLowerCase().includes(search.value.toLowerCase()));
      const describe = () => (count.textContent = `${some.length} of ${all.length} metrics match, ${this.names.length} are shown`);
      describe();
      fill(choices, some.map((name) => this.#choice(name, describe)));
    };
    this.#drawChoices();
    return el("details", { class: "metrics" }, el("summary", {}, "Metrics"), field("Search metrics", search), count, choices);
  }

  #choice(name, chosen) {
    const box = el("input", { type: "checkbox", id: `metric-${name}`, on: { change: async () => {
      this.isAutomatic = false;
      this.names = box.checked ? [...this.names, name] : this.names.filter((one) => one !== name);
      chosen();
      announce(`${name} ${box.checked ? "shown" : "hidden"}`);
      this.#save();
      await this.#refresh();
    } } });
    box.checked = this.names.includes(name);
    return el("label", { class: "check" }, box, name);
  }

  async #load() {
    let loaded = await this.#loadRuns();
    if (loaded.some(({ answer }, place) => answer.metrics !== Object.keys(this.runs[place].metrics).length)) {
      this.runs = await Promise.all(this.runs.map((one) => get(`/api/runs/${one.id}`))); // as after the first evaluation
      this.#list();
      this.#drawChoices();
      loaded = [...loaded, ...await this.#loadRuns()];
    }
    const { names } = this;
    this.#empty.hidden = names.length > 0;
    this.#empty.textContent = this.#metrics.length ? "No metrics are chosen." : "No metrics are recorded yet.";
    fill(this.#unread, loaded.slice(-this.runs.length).map(({ answer }, place) =>
      leftOut(`metrics.jsonl of ${this.#label(this.runs[place])}`, answer.left_out)));
    const isNew = this.#charts.size !== names.length || names.some((name) => !this.#charts.has(name));
    if (isNew || loaded.some(({ changed }) => changed)) this.#draw();
  }

  #loadRuns() {
    return Promise.all(this.runs.map((one) => this.#points.load(one, this.names)));
  }

  #draw() {
    this.#placeCharts();
    for (const name of this.names) {
      const lines = this.runs.flatMap((one, place) => {
        const points = this.#points.get(one, name);
        if (!points || this.#hidden.has(one.id)) return [];
        const x = this.unit === "step" ? points.steps : points.minutes;
        return [{ id: one.id, label: this.#label(one), place, x, y: points.values, missing: points.not_finite }];
      });
      this.#charts.get(name).draw(lines, { smooth: this.smooth, log: this.log, unit: this.unit });
    }
  }

  /** Close the charts of metrics that are no longer chosen, and add those of new ones. */
  #placeCharts() {
    for (const [name, one] of this.#charts) {
      if (this.names.includes(name)) continue;
      one.close();
      this.#charts.delete(name);
    }
    for (const name of this.names) {
      if (this.#charts.has(name)) continue;
      this.#charts.set(name, chart(this.#keys.includes(name) ? name.replaceAll("_", " ") : name, "curves"));
      this.#charts.get(name).figure.append(this.#explanation(name));
    }
    const figures = this.names.map((name) => this.#charts.get(name).figure), now = this.#grid.children;
    if (figures.length !== now.length || figures.some((figure, place) => now[place] !== figure)) fill(this.#grid, figures);
  }

  /** The explanation of a metric, requested when it is opened. */
  #explanation(name) {
    const box = el("details", { on: { toggle: async () => {
      if (!box.open || box.children.length > 1) return;
      const kinds = new Set(this.runs.map((one) => (one.kind === "experiment" ? "areno run" : "areno train")));
      const all = await get("/api/explain", { name }), fitting = all.filter((one) => kinds.has(one.command));
      const lines = (fitting.length ? fitting : all).map((one) => [
        el("p", {}, el("code", {}, one.name), ` ${one.meaning}${one.unit ? ` (${one.unit})` : ""}`),
        one.normal && el("p", {}, `Normal: ${one.normal}`), one.remedy && el("p", {}, `If the values are not normal: ${one.remedy}`)]);
      box.append(el("div", {}, all.length ? lines.flat().filter(Boolean) : "This metric is not documented."));
    } } }, el("summary", {}, "What it means"));
    return box;
  }
}
