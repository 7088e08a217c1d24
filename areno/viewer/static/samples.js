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
  const samples = new SampleList(run, params);
  fill(page, el("h1", {}, "Samples"), samples.elements());
  return samples.start();
}

class SampleList {
  #offset = 0;
  #until = null;
  #recorded = 0;
  #taken = 0;
  #isOpen = false;
  #turn = 0; // counts changes of the filters, so that late answers to earlier ones are ignored
  #list = el("ol", { class: "samples", "aria-label": "Samples" });
  #count = el("p", { "aria-live": "polite" });
  #unread = el("div");
  #more = el("button", { on: { click: () => this.#next() } }, "More");
  #fresh = el("button", { class: "main", hidden: true, on: { click: async () => {
    await this.#restart();
    this.#list.querySelector("a")?.focus();
  } } });

  constructor(run, params) {
    this.run = run;
    this.query = Object.fromEntries(FIELDS.map((name) => [name, params.get(name) ?? ""]));
    this.query.order ||= "newest";
    this.flags = params.getAll("flag");
  }

  elements() {
    return [
      this.#filters(),
      el("p", { class: "muted small" }, "Each step records the best, worst and first answers to its first prompts. The keys ",
        el("kbd", {}, "j"), " and ", el("kbd", {}, "k"), " select a sample, and ", el("kbd", {}, "Enter"), " opens it."),
      this.#fresh, this.#count, this.#unread, this.#list, this.#more,
    ];
  }

  /** List the samples, and watch for new ones; returns a function that stops watching. */
  async start() {
    const keys = (event) => this.#press(event);
    document.addEventListener("keydown", keys);
    const back = listed.run === this.run && listed.hash === location.hash ? listed.opened : null;
    await this.#restart();
    this.#isOpen = true;
    document.getElementById(`sample-${back}`)?.focus();
    const look = coalesced(() => this.#look(), 500);
    const end = follow([this.run], ({ changed }) => (!changed || changed.includes("samples")) && look());
    return () => {
      this.#turn++;
      document.removeEventListener("keydown", keys);
      end();
    };
  }

  #filters() {
    const input = (name, label, properties) => {
      const control = el("input", { ...properties, value: this.query[name], on: { change: () => this.#ask(name, control.value) } });
      return field(label, control);
    };
    return el("form", { class: "bar", "aria-label": "Filters", on: { submit: (event) => event.preventDefault() } },
      input("text", "Search in prompts, answers and messages", { type: "search", size: 24 }),
      input("step_from", "From step", { type: "number", min: 0, class: "short" }),
      input("step_to", "To step", { type: "number", min: 0, class: "short" }),
      input("reward_min", "Reward from", { type: "number", step: "any", class: "short" }),
      input("reward_max", "Reward to", { type: "number", step: "any", class: "short" }),
      field("Order", select(ORDERS, this.query.order, (value) => this.#ask("order", value))),
      el("fieldset", {}, el("legend", {}, "With any of these flags"), FLAGS.map((name) => this.#flag(name))));
  }

  #flag(name) {
    const box = el("input", { type: "checkbox", on: { change: () => {
      this.flags = box.checked ? [...this.flags, name] : this.flags.filter((one) => one !== name);
      this.#restart();
    } } });
    box.checked = this.flags.includes(name);
    return el("label", { class: "check" }, box, name);
  }

  #ask(name, value) {
    this.query[name] = value;
    return this.#restart();
  }

  async #restart() {
    this.#turn++;
    this.#offset = this.#taken = 0;
    this.#until = null;
    this.#fresh.hidden = true;
    const path = `run/${this.run}/samples`;
    const state = { ...this.query, order: this.query.order === "newest" ? null : this.query.order, flag: this.flags };
    keep(path, state);
    Object.assign(listed, { run: this.run, hash: link(path, state), indices: [] });
    fill(this.#list);
    await this.#next();
  }

  /** Request pages until there are 50 more samples: a page of a search may be empty. */
  async #next() {
    const turn = this.#turn, wanted = this.#taken + 50;
    this.#more.disabled = true;
    do {
      const page = { ...this.query, flag: this.flags, offset: this.#offset, until: this.#until };
      const answer = await get(`/api/runs/${this.run}/samples`, page).catch((error) => ({ error }));
      if (turn !== this.#turn) return;
      if (answer.error && !this.#isOpen) throw answer.error;
      if (answer.error) {
        this.#count.textContent = answer.error.message;
        this.#more.disabled = this.#more.hidden = false; // to retry
        return;
      }
      this.#add(answer);
    } while (this.#offset !== null && this.query.text && this.#taken < wanted);
    this.#more.disabled = false;
    this.#more.hidden = this.#offset === null;
    if (!this.#taken) announce("No sample matches");
  }

  #add(answer) {
    const { samples } = answer, first = this.#list.children.length;
    this.#list.append(...samples.map((sample) => item(this.run, sample)));
    listed.indices.push(...samples.map((sample) => sample.index));
    this.#taken += samples.length;
    this.#recorded = this.#until === null ? answer.recorded : this.#recorded; // later samples are not in this list
    this.#until = answer.until;
    this.#offset = answer.next;
    this.#count.textContent = this.#summary(answer);
    fill(this.#unread, leftOut("samples.jsonl", answer.left_out));
    if (first && samples.length && document.activeElement === this.#more) this.#list.children[first].firstChild.focus();
  }

  #summary({ matching, recorded }) {
    const searched = Math.min(this.#offset ?? matching, matching);
    const shown = this.query.text ? `${this.#taken} samples match; ${searched} of ${matching} were searched` : `${this.#taken} of ${matching} samples are shown`;
    return matching !== recorded || this.query.text ? `${shown}; ${recorded} are recorded.` : `${shown}.`;
  }

  async #look() {
    const answer = await get(`/api/runs/${this.run}/samples`, { limit: 1 }), added = answer.recorded - this.#recorded;
    if (added < 0) return this.#restart();
    this.#fresh.hidden = added === 0;
    this.#fresh.textContent = `Show ${plural(added, "new sample")}`;
    return undefined;
  }

  #press(event) {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { j: 1, k: -1 }[event.key];
    if (!step) return;
    const links = [...this.#list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    links[Math.min(Math.max(at + step, 0), links.length - 1)]?.focus();
    event.preventDefault();
  }
}

function item(run, sample) {
  const marks = sample.flags.filter((flag) => flag !== "rows");
  const parts = Object.entries(sample.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const excerpt = sample.excerpt === null ? "(not shown, because the line is damaged or longer than 16 MiB)" : visibleText(sample.excerpt) || "(empty)";
  return el("li", {}, el("a", { href: link(`run/${run}/sample/${sample.index}`), id: `sample-${sample.index}` },
    el("span", { class: "head" }, el("strong", {}, nameOf(sample)),
      el("span", {}, `reward ${number(sample.reward)}`, parts && ` (${parts})`),
      el("span", {}, `advantage ${number(sample.advantage)}`),
      el("span", {}, plural(sample.tokens, "token")),
      marks.map((mark) => el("span", { class: `mark ${mark}` }, mark))),
    el("span", { class: "excerpt" }, excerpt)));
}
