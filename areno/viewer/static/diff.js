// What differs between two runs: the first step that differs and why, settings, environment, curves.

import { get } from "./api.js";
import { keep, link } from "./app.js";
import { el, field, fill, number, select, shown, table } from "./dom.js";

export async function show(page, { params }) {
  const { runs } = await get("/api/runs");
  const names = runs.map((row) => [row.id, row.path]);
  let left = params.get("left") ?? runs[0]?.id, right = params.get("right") ?? runs[1]?.id;
  if (!left || !right) throw new Error("A comparison needs two runs, but this folder has fewer.");
  const name = (id) => names.find(([key]) => key === id)?.[1] ?? id;
  const body = el("div"), curvesLink = el("a", { class: "button", href: link("curves", { run: [left, right] }) }, "Curves");

  fill(
    page,
    el("h1", {}, "What differs"),
    el("div", { class: "bar" },
      field("Left", select(names, left, (id) => ((left = id), load()))),
      field("Right", select(names, right, (id) => ((right = id), load()))),
      curvesLink),
    body,
  );

  function settings(title, list) {
    const rows = list.map((one) => [
      [el("code", {}, one.name), one.same > 0 && el("span", { class: "muted" }, ` and ${one.same} more of this name`)].filter(Boolean),
      ...one.values.map((value) => el("code", {}, shown(value))),
    ]);
    return [el("h2", {}, title), rows.length ? table(title, ["Name", name(left), name(right)], rows, { class: "diff" }) : el("p", {}, "No differences.")];
  }

  function firstDifference({ divergence, causes }) {
    const { different, unequal, steps } = divergence;
    if (!steps) return el("p", {}, "The runs have no metrics in common.");
    if (!different) {
      return el("p", {}, unequal
        ? `The ${steps} steps that both runs recorded agree to 1e-6, but are not bit-equal from step ${unequal.step} on: ${unequal.text}.`
        : `The ${steps} steps that both runs recorded are bit-equal.`);
    }
    const cause = causes.map((one) => `${one.name}: ${shown(one.values[0])} in the first run, ${shown(one.values[1])} in the second`).join("; ");
    return [
      el("p", {}, el("strong", {}, `Step ${different.step}, ${different.phase}`), different.text && `: ${different.text}`),
      el("p", {}, cause ? `Differences that affect this phase: ${cause}` : "All settings that affect this phase are the same in both runs."),
    ];
  }

  function curves(list) {
    const rows = list.map((one) => [one.key.replaceAll("_", " "), ...[...one.first, ...one.last, ...one.mean, one.difference].map(number)]);
    const heads = ["Metric", ...["First", "Last", "Mean"].flatMap((which) => [`${which}, left`, `${which}, right`]), "Difference of means"];
    return [el("h2", {}, "Curves over the steps that both runs recorded"), rows.length ? table("Curves", heads, rows) : el("p", {}, "The runs have no metrics in common.")];
  }

  let turn = 0;
  async function load() {
    const mine = ++turn;
    keep("diff", { left, right });
    const answer = await get("/api/diff", { left, right }).catch((error) => ({ error }));
    if (mine !== turn) return; // other runs were chosen meanwhile
    if (answer.error) return fill(body, el("p", { role: "alert", class: "problem" }, answer.error.message));
    curvesLink.setAttribute("href", link("curves", { run: [left, right] }));
    fill(
      body,
      el("h2", {}, "First difference"), firstDifference(answer),
      settings("Settings that may change results", answer.settings.filter((one) => one.changes_results)),
      settings("Other settings", answer.settings.filter((one) => !one.changes_results)),
      settings("Environment", answer.environment),
      curves(answer.curves),
    );
  }

  await load();
}
