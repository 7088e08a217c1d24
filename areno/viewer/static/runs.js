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
  const list = new RunList();
  fill(page, el("h1", {}, "Runs"), list.elements());
  await list.load();
  return follow([], coalesced(() => list.load(), 500));
}

class RunList {
  #rows = [];
  #sort = "started";
  #isDescending = true;
  #words = "";
  #body = el("tbody");
  #heads = el("tr");
  #note = el("p", { class: "muted" });
  #actions = el("div", { class: "bar" });

  elements() {
    const search = el("input", { type: "search", on: { input: () => {
      this.#words = search.value.toLowerCase();
      this.#draw();
    } } });
    return [
      this.#note,
      el("div", { class: "bar" }, field("Filter by name, algorithm, model or state", search), this.#actions),
      el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Runs" },
        el("table", { class: "runs" }, el("caption", { class: "hidden-text" }, "Runs"), el("thead", {}, this.#heads), this.#body)),
    ];
  }

  async load() {
    const answer = await get("/api/runs"), now = Date.now() / 1000;
    this.#rows = answer.runs.map((row) => {
      const end = row.ended ?? (row.state === "running" ? now : row.time);
      return { ...row, seconds: row.started && end ? end - row.started : null };
    });
    const known = new Set(this.#rows.map((row) => row.id));
    if (chosen.get().some((id) => !known.has(id))) chosen.set(chosen.get().filter((id) => known.has(id)));
    this.#note.textContent = summary(answer);
    this.#draw();
  }

  /** The rows that match the words, sorted. */
  #visible() {
    const match = (row) => `${row.path} ${row.algo} ${row.model} ${row.state}`.toLowerCase().includes(this.#words);
    const isMissing = (value) => value === null || value === undefined || value === "NaN";
    const order = (a, b) => {
      const [x, y] = [a[this.#sort], b[this.#sort]];
      if (isMissing(x) !== isMissing(y)) return isMissing(x) ? 1 : -1; // missing values are last in both directions
      const sign = x === y || isMissing(x) ? 0 : x < y ? -1 : 1;
      return (sign || (a.path < b.path ? -1 : 1)) * (this.#isDescending ? -1 : 1);
    };
    return this.#rows.filter(match).sort(order);
  }

  #draw() {
    const list = this.#visible(), picked = new Set(chosen.get());
    fill(this.#heads, el("th", { scope: "col" }, el("span", { class: "hidden-text" }, "Chosen")), COLUMNS.map((column) => this.#head(column)));
    const none = this.#rows.length ? "No run matches."
      : "There are no runs yet. A run is a folder with a config.yaml. Links to other folders are not followed.";
    fill(this.#body, list.length ? list.map((row) => this.#row(row, picked))
      : el("tr", {}, el("td", { colspan: COLUMNS.length + 1 }, none)));
    fill(this.#actions, actions(list, picked));
  }

  #head([name, text]) {
    return el("th", { scope: "col", "aria-sort": name === this.#sort ? (this.#isDescending ? "descending" : "ascending") : null },
      el("button", { class: "sort", id: `sort-${name}`, on: { click: () => this.#sortBy(name, text) } }, text));
  }

  #row(row, picked) {
    const box = el("input", { type: "checkbox", id: `choose-${row.id}`, "aria-label": `Choose ${row.path}`,
      on: { change: () => this.#choose(row.id, box.checked) } });
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

  #sortBy(name, text) {
    this.#isDescending = name === this.#sort ? !this.#isDescending : !["name", "algo", "model"].includes(name);
    this.#sort = name;
    this.#draw();
    announce(`Sorted by ${text}, ${this.#isDescending ? "descending" : "ascending"}`);
  }

  #choose(id, on) {
    chosen.set(on ? [...chosen.get(), id] : chosen.get().filter((one) => one !== id));
    this.#draw();
  }
}

function summary({ runs, folder, has_more: hasMore, outside }) {
  return `${plural(runs.length, "run")} in ${folder}` + (hasMore ? "; further runs are not listed" : "") +
    (outside ? `; ${plural(outside, "link")} to places outside this folder ${outside === 1 ? "is" : "are"} not followed` : "");
}

/** Links to the curves of the chosen runs, or else of the first ones, and to the differences between two. */
function actions(list, picked) {
  const ids = list.filter((row) => picked.has(row.id)).map((row) => row.id);
  const shownIds = ids.length ? ids : list.filter((row) => !row.problem).slice(0, MOST_CURVES).map((row) => row.id);
  return [
    shownIds.length > 0 && el("a", { class: "button main", href: link("curves", { run: shownIds }) },
      ids.length ? `Curves of ${ids.length} chosen runs` : `Curves of ${shownIds.length === list.length ? "all" : `the first ${shownIds.length}`} runs`),
    ids.length === 2
      ? el("a", { class: "button", href: link("diff", { left: ids[0], right: ids[1] }) }, "What differs")
      : el("span", { class: "muted" }, "Choose two runs to see what differs."),
  ];
}
