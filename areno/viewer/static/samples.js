// Recorded samples: filters, text search, pages; j and k move, Enter opens.

import { coalesced, follow, get } from "./api.js";
import { keep, link } from "./app.js";
import { announce, el, field, fill, leftOut, number, plural, select } from "./dom.js";
import { visibleText } from "./tokens.js";

const ORDERS = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["best", "best reward first"],
  ["worst", "worst reward first"],
  ["longest", "longest first"],
  ["shortest", "shortest first"],
];
const FLAGS = ["best", "worst", "first", "truncated"];
const FIELDS = ["step_from", "step_to", "reward_min", "reward_max", "text", "order"];

/** The samples of the last list, in its order, so that a sample's page can go to the next one. */
export const listed = { run: null, hash: "", indices: [] };

/** A sample's name as `areno inspect` shows it. */
export function nameOf(sample) {
  return `${sample.step}/${sample.prompt}/${sample.sample}`;
}

export async function show(page, { run, params }) {
  const query = Object.fromEntries(FIELDS.map((name) => [name, params.get(name) ?? ""]));
  query.order ||= "newest";
  let flags = params.getAll("flag"), offset = 0, until = null, recorded = 0, taken = 0, isOpen = false;
  const list = el("ol", { class: "samples", "aria-label": "Samples" });
  const count = el("p", { "aria-live": "polite" });
  const unread = el("div");
  const more = el("button", { on: { click: () => next() } }, "More");
  const fresh = el("button", { class: "main", hidden: true, on: { click: () => restart().then(() => list.querySelector("a")?.focus()) } });

  function input(name, label, properties) {
    const control = el("input", { ...properties, value: query[name], on: { change: () => ((query[name] = control.value), restart()) } });
    return field(label, control);
  }

  const boxes = FLAGS.map((name) => {
    const box = el("input", { type: "checkbox", on: { change: () => {
      flags = box.checked ? [...flags, name] : flags.filter((one) => one !== name);
      restart();
    } } });
    box.checked = flags.includes(name);
    return el("label", { class: "check" }, box, name);
  });
  fill(
    page,
    el("h1", {}, "Samples"),
    el("form", { class: "bar", "aria-label": "Filters", on: { submit: (event) => event.preventDefault() } },
      input("text", "Search in prompts, answers and messages", { type: "search", size: 24 }),
      input("step_from", "From step", { type: "number", min: 0, class: "short" }),
      input("step_to", "To step", { type: "number", min: 0, class: "short" }),
      input("reward_min", "Reward from", { type: "number", step: "any", class: "short" }),
      input("reward_max", "Reward to", { type: "number", step: "any", class: "short" }),
      field("Order", select(ORDERS, query.order, (value) => ((query.order = value), restart()))),
      el("fieldset", {}, el("legend", {}, "Only (any of)"), boxes)),
    el("p", { class: "muted small" }, "The best, worst and first answer to the first prompts of each step are recorded. ",
      el("kbd", {}, "j"), " and ", el("kbd", {}, "k"), " move, ", el("kbd", {}, "Enter"), " opens."),
    fresh, count, unread, list, more,
  );

  function item(sample) {
    const marks = sample.flags.filter((flag) => flag !== "rows");
    const parts = Object.entries(sample.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    return el("li", {}, el("a", { href: link(`run/${run}/sample/${sample.index}`), id: `sample-${sample.index}` },
      el("span", { class: "head" }, el("strong", {}, nameOf(sample)),
        el("span", {}, `reward ${number(sample.reward)}`, parts && ` (${parts})`),
        el("span", {}, `advantage ${number(sample.advantage)}`),
        el("span", {}, plural(sample.tokens, "token")),
        marks.map((mark) => el("span", { class: `mark ${mark}` }, mark))),
      el("span", { class: "excerpt" }, sample.excerpt === null ? "(not read: damaged, or longer than 16 MiB)" : visibleText(sample.excerpt) || "(empty)")));
  }

  function describe(answer) {
    const filtered = answer.matching !== answer.recorded || query.text;
    const shownText = query.text
      ? `${taken} found in ${Math.min(offset ?? answer.matching, answer.matching)} searched of ${answer.matching}`
      : `${taken} of ${answer.matching} shown`;
    count.textContent = filtered ? `${shownText}; ${answer.recorded} recorded in all.` : `${shownText}.`;
  }

  let turn = 0;
  async function next() {
    const mine = turn;
    more.disabled = true;
    const wanted = taken + 50;
    do {
      const answer = await get(`/api/runs/${run}/samples`, { ...query, flag: flags, offset, until }).catch((error) => ({ error }));
      if (mine !== turn) return;
      if (answer.error && !isOpen) throw answer.error;
      if (answer.error) {
        count.textContent = answer.error.message;
        more.disabled = false; // tries again
        more.hidden = false;
        return;
      }
      const first = list.children.length;
      list.append(...answer.samples.map(item));
      listed.indices.push(...answer.samples.map((sample) => sample.index));
      taken += answer.samples.length;
      ({ until, recorded } = answer);
      offset = answer.next;
      describe(answer);
      fill(unread, leftOut("samples.jsonl", answer.left_out));
      if (first && answer.samples.length && document.activeElement === more) list.children[first].firstChild.focus();
    } while (offset !== null && query.text && taken < wanted);
    more.disabled = false;
    more.hidden = offset === null;
    if (!taken) announce("No sample matches");
  }

  async function restart() {
    turn++;
    offset = 0;
    until = null;
    taken = 0;
    fresh.hidden = true;
    const path = `run/${run}/samples`, state = { ...query, order: query.order === "newest" ? null : query.order, flag: flags };
    keep(path, state);
    Object.assign(listed, { run, hash: link(path, state), indices: [] });
    fill(list);
    await next();
  }

  function keys(event) {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { j: 1, k: -1 }[event.key];
    if (!step) return;
    const links = [...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    links[Math.min(Math.max(at + step, 0), links.length - 1)]?.focus();
    event.preventDefault();
  }

  document.addEventListener("keydown", keys);
  const back = listed.run === run && listed.hash === location.hash ? listed.opened : null;
  await restart();
  isOpen = true;
  document.getElementById(`sample-${back}`)?.focus();
  const look = coalesced(async () => {
    const answer = await get(`/api/runs/${run}/samples`, { limit: 1 });
    const added = answer.recorded - recorded;
    if (added < 0) return restart();
    fresh.hidden = added === 0;
    fresh.textContent = `Show ${plural(added, "new sample")}`;
    return undefined;
  }, 500);
  const end = follow([run], ({ changed }) => (!changed || changed.includes("samples")) && look());
  return () => {
    turn++;
    document.removeEventListener("keydown", keys);
    end();
  };
}
