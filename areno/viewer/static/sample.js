// One sample: its conversation as turns, its training rows as a tree, and its tokens.

import { get } from "./api.js";
import { keep, link } from "./app.js";
import { el, fill, number } from "./dom.js";
import { listed, nameOf } from "./samples.js";
import { forksOf, rowsOf, tokenView, visibleText } from "./tokens.js";

const MOST_SHOWN = 240;
const ROLES = { given: "prompt", text: "assistant", call: "assistant", developer: "system", function: "tool" };

export async function show(page, { run, parts, params }) {
  const index = Number(parts[3]);
  const sample = new Sample(run, index, await get(`/api/runs/${run}/samples/${index}`), params);
  if (listed.run === run) listed.opened = index;
  fill(page, sample.elements());
  sample.draw();
  const keys = (event) => sample.press(event);
  document.addEventListener("keydown", keys);
  return () => document.removeEventListener("keydown", keys);
}

class Sample {
  #body = el("div");

  constructor(run, index, answer, params) {
    Object.assign(this, { run, index, record: answer.record });
    this.others = answer.same_prompt.filter((one) => one.index !== index);
    this.rows = rowsOf(this.record.rows ?? []);
    this.forks = forksOf(this.rows);
    this.newest = this.rows.length - 1;
    const asked = Number(params.get("row") ?? this.newest);
    this.branch = asked in this.rows ? asked : this.newest;
    this.color = params.get("color") ?? "advantage";
    this.around = this.#neighbors(answer.recorded);
    this.list = listed.run === run ? listed.hash : link(`run/${run}/samples`);
  }

  elements() {
    const { step, prompt_index: prompt, sample_index: sample } = this.record;
    return [el("h1", {}, `Sample ${nameOf({ step, prompt, sample })}`), this.#navigation(), this.#facts(), this.#siblings(), this.#body];
  }

  /** The samples before and after this one in the list, or in the file if this one is not in the list. */
  #neighbors(recorded) {
    const at = listed.run === this.run ? listed.indices.indexOf(this.index) : -1;
    if (at >= 0) return { before: listed.indices[at - 1] ?? null, after: listed.indices[at + 1] ?? null };
    return { before: this.index ? this.index - 1 : null, after: this.index + 1 < recorded ? this.index + 1 : null };
  }

  #address(index) {
    return link(`run/${this.run}/sample/${index}`);
  }

  #navigation() {
    const { before, after } = this.around;
    return el("nav", { class: "bar", "aria-label": "Samples" },
      el("a", { class: "button", href: this.list }, "Back to the list"),
      before !== null && el("a", { class: "button", href: this.#address(before) }, "Previous (k)"),
      after !== null && el("a", { class: "button", href: this.#address(after) }, "Next (j)"));
  }

  #facts() {
    const { record } = this, picked = [record.picked ?? []].flat().join(", ") || null;
    const values = [
      ["Reward", number(record.reward)],
      ...Object.entries(record.reward_parts ?? {}).map(([name, value]) => [`part ${name}`, number(value)]),
      ["Advantage", number(record.advantage)],
      ["Tokens", number(record.response_len)],
      ["Ended by", record.finish_reason === "length" ? "the token limit" : record.finish_reason],
      ["Mean log-prob", number(record.logprob_mean)],
      ["Recorded as", picked && `${picked} of its prompt`],
    ];
    return el("dl", { class: "facts" }, values.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value ?? "–"))));
  }

  #siblings() {
    return this.others.length > 0 && el("p", { class: "siblings" }, "Other answers to this prompt: ", this.others.map((one) =>
      [el("a", { href: this.#address(one.index) }, `sample ${one.sample}, reward ${number(one.reward)}`), " "]));
  }

  draw() {
    const { rows, branch, color } = this;
    keep(`run/${this.run}/sample/${this.index}`, { row: branch === this.newest ? null : branch, color: color === "advantage" ? null : color });
    fill(
      this.#body,
      rows.length > 1 && this.#tree(),
      el("h2", {}, rows.length > 1 ? `Conversation of branch ${branch + 1}` : "Conversation"),
      el("ol", { class: "turns" }, this.#turns().map(turnElement)),
      el("h2", {}, "Tokens"),
      rows.length
        ? tokenView(rows[branch], this.forks[branch], { color, change: (value) => this.#choose({ color: value }) })
        : el("p", { class: "muted" }, "The tokens of this sample were not recorded, because each step records only the tokens of its first samples."),
    );
  }

  #choose(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  #tree() {
    return [el("h2", {}, "Branches"),
      el("p", { class: "muted small" }, "If a request does not continue the tokens of earlier requests, its conversation becomes another training row (a branch)."),
      el("ul", { class: "tree" }, this.#branches(null))];
  }

  /** The branches that fork from a row, each with those that fork from it. */
  #branches(parent) {
    return this.forks.flatMap((fork, place) => (fork.parent === parent ? [this.#branch(fork, place)] : []));
  }

  #branch(fork, place) {
    const row = this.rows[place], trained = row.filter((token) => token.trained).length, below = this.#branches(place);
    return el("li", {},
      el("button", { "aria-pressed": String(place === this.branch), class: "branch", id: `branch-${place}`,
        on: { click: () => this.#choose({ branch: place }) } }, `Branch ${place + 1}`),
      ` ${row.length} tokens, ${trained} trained`,
      fork.parent !== null && [`, forks from branch ${fork.parent + 1} after ${fork.at} tokens (turn ${fork.turn + 1})`, this.#edit(place)],
      below.length > 0 && el("ul", {}, below));
  }

  /** How the parent continues after the fork, and what the branch has instead. */
  #edit(place) {
    const { parent, at, until } = this.forks[place];
    const cut = (tokens) => {
      const text = tokens.map((token) => token.text).join("");
      return visibleText(text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text);
    };
    return el("div", { class: "edit" },
      el("div", {}, el("span", { class: "muted" }, `branch ${parent + 1}: `), el("del", {}, cut(this.rows[parent].slice(at)))),
      el("div", {}, el("span", { class: "muted" }, "this branch: "), el("ins", {}, cut(this.rows[place].slice(at, Math.max(until, at + 1))))));
  }

  #turns() {
    const { record, rows, branch } = this;
    if (Array.isArray(record.messages) && record.messages.length && branch === this.newest) return record.messages.map(fromMessage);
    if (rows.length) return fromRow(rows[branch], this.forks[branch]);
    return [{ role: "prompt", text: record.prompt }, { role: "assistant", text: record.completion }];
  }

  /** Handle a key: j and k go to the next and the previous sample, Escape to the list. */
  press(event) {
    if (event.target.closest("input, select, textarea, .tokens") || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = { j: this.around.after, k: this.around.before }[event.key] ?? null;
    if (target !== null) location.hash = this.#address(target);
    if (event.key === "Escape") location.hash = this.list;
  }
}

function turnElement(turn) {
  const calls = (turn.calls ?? []).map((call) => el("div", { class: "call" }, el("div", { class: "role" }, `calls ${visibleText(call.name)}`),
    el("pre", { class: "text" }, visibleText(call.text))));
  return el("li", { class: `turn ${turn.role}` },
    el("div", { class: "role" }, visibleText(turn.role), turn.name && ` · ${visibleText(turn.name)}`, turn.edited && el("strong", {}, " · edited")),
    turn.text && el("pre", { class: "text" }, visibleText(turn.text)), calls);
}

function pretty(text) {
  try {
    return JSON.stringify(typeof text === "string" ? JSON.parse(text) : text, null, 2);
  } catch {
    return String(text);
  }
}

function textOf(content) {
  if (typeof content === "string" || content === null || content === undefined) return content ?? "";
  if (!Array.isArray(content)) return JSON.stringify(content);
  return content.map((part) => part?.text ?? JSON.stringify(part)).join("\n");
}

/** A message in OpenAI's format. */
function fromMessage(message) {
  const calls = (message.tool_calls ?? []).map((call) => ({ name: call.function?.name ?? call.type, text: pretty(call.function?.arguments ?? call) }));
  const reasoning = message.reasoning_content ?? message.reasoning;
  const text = [reasoning && `[reasoning] ${reasoning}`, textOf(message.content)].filter(Boolean).join("\n");
  return { role: String(ROLES[message.role] ?? message.role), name: message.name ?? message.tool_call_id, text, calls };
}

/** The turns of a training row, from the roles of its tokens; the template's markup is left out. */
function fromRow(row, fork) {
  const turns = [];
  row.forEach((token, place) => {
    if (token.role === "template") {
      if (turns.length) turns.at(-1).closed = true;
      return;
    }
    const role = ROLES[token.role] ?? token.role;
    let last = turns.at(-1);
    if (!last || last.closed || last.role !== role) turns.push((last = { role, text: "", calls: [] }));
    if (token.role === "call") {
      if (!last.calls.length) last.calls.push({ name: "a tool", text: "" });
      last.calls[0].text += token.text;
    } else last.text += token.text;
    if (fork.parent !== null && place >= fork.at && place < fork.until) last.edited = true;
  });
  return turns;
}
