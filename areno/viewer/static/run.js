// The overview of a run: state, warnings with remedies, last values, configuration, environment.

import { coalesced, follow, get } from "./api.js";
import { link } from "./app.js";
import { badge, duration, el, field, fill, flat, leftOut, number, shown, table, when } from "./dom.js";

export async function show(page, { run }) {
  const top = el("div"), details = el("div");
  fill(page, top, details);
  let words = "";

  function facts(data) {
    const { status, keys, metrics } = data;
    const end = status.ended ?? (status.state === "running" ? Date.now() / 1000 : data.updated);
    const seconds = status.started && end ? end - status.started : null;
    const values = [
      ["State", [badge(status.state ?? "unknown"), status.error && ` ${status.error}`, status.signal && ` ${status.signal}`]],
      ["Algorithm", data.algo],
      ["Model", data.model],
      ["Started", when(status.started)],
      ["Duration", duration(seconds)],
      ["Steps", number(data.steps)],
      ["Recorded samples", el("a", { href: link(`run/${run}/samples`) }, number(data.samples))],
      ...["reward", "eval_reward", "loss", "tokens_per_second", "step_seconds"]
        .filter((key) => keys[key])
        .map((key) => [key.replaceAll("_", " "), number(metrics[keys[key]])]),
      ...Object.entries(data.summary.best_evaluation ?? {}).map(([name, value]) => [`best evaluation: ${name}`, shown(value)]),
    ];
    return el("dl", { class: "facts" }, values.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value ?? "–"))));
  }

  function warnings(list) {
    if (!list.length) return el("p", { class: "muted" }, "No health warnings.");
    return el("ul", { class: "warnings" }, list.slice().reverse().map((one) =>
      el("li", {}, el("a", { href: link(`run/${run}/samples`, { step_from: one.step, step_to: one.step }) }, `step ${one.step}`),
        ` · ${when(one.time)}`, el("p", {}, String(one.text ?? "").replace(/^step \d+: /, "")))));
  }

  function settings(data) {
    const rows = [...flat(data.config), ...flat(data.environment, "environment.")];
    const body = el("div");
    const draw = () => {
      const some = rows.filter(([name, value]) => `${name} ${shown(value)}`.toLowerCase().includes(words));
      fill(body, table("Configuration and environment", ["Setting", "Value"], some.map(([name, value]) =>
        [el("code", {}, name), el("code", {}, shown(value))]), { class: "settings" }));
    };
    const search = el("input", { type: "search", value: words, on: { input: () => ((words = search.value.toLowerCase()), draw()) } });
    draw();
    return [field("Filter settings", search), body];
  }

  let config = null;
  async function load() {
    const data = await get(`/api/runs/${run}`);
    fill(top, el("h1", {}, data.name), facts(data), Object.entries(data.left_out).map(([file, bytes]) => leftOut(file, bytes)),
      el("h2", {}, "Warnings"), warnings(data.warnings));
    const text = JSON.stringify([data.config, data.environment]);
    if (text !== config) {
      config = text;
      fill(details, el("h2", {}, "Configuration and environment"), settings(data));
    }
  }

  await load();
  const refresh = coalesced(load, 500);
  const shownParts = ["metrics", "samples", "status", "warnings"];
  return follow([run], ({ changed }) => (!changed || changed.some((part) => shownParts.includes(part))) && refresh());
}
