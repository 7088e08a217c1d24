// The list of runs: sorted, filtered, chosen.

import { coalesced, follow, get } from "./api.js";
import { chosen, link } from "./app.js";
import { announce, badge, duration, el, field, fill, number, plural, when } from "./dom.js";

const COLUMNS = [
  ["name", "Run"],
  ["state", "State"],
  ["algo", "Algorithm"],
  ["steps", "Steps"],
  ["reward", "Reward"],
  ["loss", "Loss"],
  ["warnings", "Warnings"],
  ["started", "Started"],
  ["seconds", "Duration"],
  ["model", "Model"],
];
const MOST_CURVES = 8;

export async function show(page) {
  let rows = [], sort = "started", descending = true, words = "";
  const body = el("tbody"), heads = el("tr"), note = el("p", { class: "muted" });
  const actions = el("div", { class: "bar" });
  const search = el("input", { type: "search", on: { input: () => ((words = search.value.toLowerCase()), draw()) } });

  fill(
    page,
    el("h1", {}, "Runs"),
    note,
    el("div", { class: "bar" }, field("Filter by name, algorithm, model or state", search), actions),
    el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Runs" },
      el("table", { class: "runs" }, el("caption", { class: "hidden-text" }, "Runs"), el("thead", {}, heads), body)),
  );

  function visible() {
    const match = (row) => `${row.path} ${row.algo} ${row.model} ${row.state}`.toLowerCase().includes(words);
    const isMissing = (value) => value === null || value === undefined || value === "NaN";
    const order = (a, b) => {
      const [x, y] = [a[sort], b[sort]];
      if (isMissing(x) !== isMissing(y)) return isMissing(x) ? 1 : -1; // last in both directions
      const sign = x === y || isMissing(x) ? 0 : x < y ? -1 : 1;
      return (sign || (a.path < b.path ? -1 : 1)) * (descending ? -1 : 1);
    };
    return rows.filter(match).sort(order);
  }

  function draw() {
    const list = visible(), picked = new Set(chosen.get());
    fill(heads, el("th", { scope: "col" }, el("span", { class: "hidden-text" }, "Chosen")), COLUMNS.map(([name, text]) =>
      el("th", { scope: "col", "aria-sort": name === sort ? (descending ? "descending" : "ascending") : null },
        el("button", { class: "sort", id: `sort-${name}`, on: { click: () => sortBy(name) } }, text))));
    fill(body, list.map((row) => rowOf(row, picked)));
    if (!list.length) {
      fill(body, el("tr", {}, el("td", { colspan: COLUMNS.length + 1 }, rows.length
        ? "No run matches." : "No runs yet: a run is a folder with a config.yaml. Links to other folders are not followed.")));
    }
    drawActions(list, picked);
  }

  function rowOf(row, picked) {
    const box = el("input", { type: "checkbox", id: `choose-${row.id}`, "aria-label": `Choose ${row.path}`,
      on: { change: () => choose(row.id, box.checked) } });
    box.checked = picked.has(row.id);
    const name = row.problem ? el("span", {}, row.name, " ", el("span", { class: "problem" }, row.problem))
      : el("a", { href: link(`run/${row.id}`), id: `run-${row.id}` }, row.name);
    return el("tr", { "data-run": row.id },
      el("td", {}, box),
      el("th", { scope: "row" }, name, row.path !== row.name && el("div", { class: "muted path" }, row.path)),
      el("td", {}, badge(row.state), row.error && el("div", { class: "muted path" }, row.error)),
      el("td", {}, row.algo ?? "–"),
      el("td", { class: "number" }, number(row.steps)),
      el("td", { class: "number" }, number(row.reward)),
      el("td", { class: "number" }, number(row.loss)),
      el("td", { class: "number" }, row.warnings ? el("strong", { class: "warning" }, `⚠ ${row.warnings}`) : "0"),
      el("td", {}, when(row.started)),
      el("td", {}, duration(row.seconds)),
      el("td", { class: "path" }, String(row.model ?? "–").split("/").slice(-2).join("/")));
  }

  function drawActions(list, picked) {
    const ids = list.filter((row) => picked.has(row.id)).map((row) => row.id);
    const shownIds = ids.length ? ids : list.filter((row) => !row.problem).slice(0, MOST_CURVES).map((row) => row.id);
    fill(
      actions,
      shownIds.length > 0 && el("a", { class: "button main", href: link("curves", { run: shownIds }) },
        ids.length ? `Curves of ${ids.length} chosen` : `Curves of ${shownIds.length === list.length ? "all" : `the first ${shownIds.length}`}`),
      ids.length === 2
        ? el("a", { class: "button", href: link("diff", { left: ids[0], right: ids[1] }) }, "What differs")
        : el("span", { class: "muted" }, "Choose two runs to see what differs."),
    );
  }

  function sortBy(name) {
    descending = name === sort ? !descending : name !== "name" && name !== "algo" && name !== "model";
    sort = name;
    draw();
    announce(`Sorted by ${COLUMNS.find(([key]) => key === name)[1]}, ${descending ? "descending" : "ascending"}`);
  }

  function choose(id, on) {
    chosen.set(on ? [...chosen.get(), id] : chosen.get().filter((one) => one !== id));
    draw();
  }

  async function load() {
    const answer = await get("/api/runs");
    const now = Date.now() / 1000;
    rows = answer.runs.map((row) => {
      const end = row.ended ?? (row.state === "running" ? now : row.time);
      return { ...row, seconds: row.started && end ? end - row.started : null };
    });
    const known = new Set(rows.map((row) => row.id));
    if (chosen.get().some((id) => !known.has(id))) chosen.set(chosen.get().filter((id) => known.has(id)));
    note.textContent = `${plural(rows.length, "run")} in ${answer.folder}` + (answer.has_more ? "; there are more, which are not listed" : "") +
      (answer.outside ? `; ${plural(answer.outside, "link")} out of this folder ${answer.outside === 1 ? "is" : "are"} not followed` : "");
    draw();
  }

  await load();
  return follow([], coalesced(load, 500));
}
