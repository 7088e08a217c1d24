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
  const answer = await get(`/api/runs/${run}/samples/${index}`);
  const { record } = answer;
  const rows = rowsOf(record.rows ?? []), forks = forksOf(rows);
  const asked = Number(params.get("row") ?? rows.length - 1);
  let branch = asked in rows ? asked : rows.length - 1;
  let color = params.get("color") ?? "advantage";
  const body = el("div");
  const around = neighbors();

  fill(
    page,
    el("h1", {}, `Sample ${nameOf({ step: record.step, prompt: record.prompt_index, sample: record.sample_index })}`),
    el("nav", { class: "bar", "aria-label": "Samples" },
      el("a", { class: "button", href: listed.run === run ? listed.hash : link(`run/${run}/samples`) }, "Back to the list"),
      around.before !== null && el("a", { class: "button", href: link(`run/${run}/sample/${around.before}`) }, "Previous (k)"),
      around.after !== null && el("a", { class: "button", href: link(`run/${run}/sample/${around.after}`) }, "Next (j)")),
    facts(), siblings(), body,
  );
  if (listed.run === run) listed.opened = index;

  function neighbors() {
    const at = listed.run === run ? listed.indices.indexOf(index) : -1;
    if (at >= 0) return { before: listed.indices[at - 1] ?? null, after: listed.indices[at + 1] ?? null };
    return { before: index ? index - 1 : null, after: index + 1 < answer.recorded ? index + 1 : null };
  }

  function facts() {
    const picked = [record.picked ?? []].flat().join(", ") || null;
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

  function siblings() {
    const others = answer.same_prompt.filter((one) => one.index !== index);
    return others.length > 0 && el("p", { class: "siblings" }, "Other answers to this prompt: ", others.map((one) =>
      [el("a", { href: link(`run/${run}/sample/${one.index}`) }, `sample ${one.sample}, reward ${number(one.reward)}`), " "]));
  }

  function draw() {
    keep(`run/${run}/sample/${index}`, { row: branch === rows.length - 1 ? null : branch, color: color === "advantage" ? null : color });
    fill(
      body,
      rows.length > 1 && tree(),
      el("h2", {}, rows.length > 1 ? `Conversation of branch ${branch + 1}` : "Conversation"),
      conversation(),
      el("h2", {}, "Tokens"),
      rows.length
        ? tokenView(rows[branch], forks[branch], { color, change: (value) => ((color = value), draw()) })
        : el("p", { class: "muted" }, "The tokens of this sample were not recorded: a step records those of its first samples only."),
    );
  }

  function tree() {
    const children = (parent) => forks.flatMap((fork, place) => (fork.parent === parent ? [place] : []));
    const node = (place) => {
      const fork = forks[place], row = rows[place], trained = row.filter((token) => token.trained).length;
      const below = children(place);
      return el("li", {},
        el("button", { "aria-pressed": String(place === branch), class: "branch", id: `branch-${place}`, on: { click: () => ((branch = place), draw()) } },
          `Branch ${place + 1}`),
        ` ${row.length} tokens, ${trained} trained`,
        fork.parent !== null && [`, forks from branch ${fork.parent + 1} after ${fork.at} tokens (turn ${fork.turn + 1})`, edit(place)],
        below.length > 0 && el("ul", {}, below.map(node)));
    };
    return [el("h2", {}, "Branches"),
      el("p", { class: "muted small" }, "A conversation whose next request does not continue the recorded tokens becomes a further training row."),
      el("ul", { class: "tree" }, children(null).map(node))];
  }

  /** What the parent continued with, and what stands there in the branch. */
  function edit(place) {
    const { parent, at, until } = forks[place];
    const cut = (tokens) => {
      const text = tokens.map((token) => token.text).join("");
      return visibleText(text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text);
    };
    return el("div", { class: "edit" },
      el("div", {}, el("span", { class: "muted" }, `branch ${parent + 1}: `), el("del", {}, cut(rows[parent].slice(at)))),
      el("div", {}, el("span", { class: "muted" }, "here: "), el("ins", {}, cut(rows[place].slice(at, Math.max(until, at + 1))))));
  }

  function conversation() {
    const structured = Array.isArray(record.messages) && record.messages.length && branch === rows.length - 1;
    const turns = structured ? record.messages.map(fromMessage) : rows.length ? fromRow(rows[branch], forks[branch]) : [
      { role: "prompt", text: record.prompt }, { role: "assistant", text: record.completion }];
    return el("ol", { class: "turns" }, turns.map((turn) => el("li", { class: `turn ${turn.role}` },
      el("div", { class: "role" }, visibleText(turn.role), turn.name && ` · ${visibleText(turn.name)}`, turn.edited && el("strong", {}, " · edited")),
      turn.text && el("pre", { class: "text" }, visibleText(turn.text)),
      (turn.calls ?? []).map((call) => el("div", { class: "call" }, el("div", { class: "role" }, `calls ${visibleText(call.name)}`),
        el("pre", { class: "text" }, visibleText(call.text)))))));
  }

  function keys(event) {
    if (event.target.closest("input, select, textarea, .tokens") || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = { j: around.after, k: around.before }[event.key];
    if (target !== undefined && target !== null) location.hash = link(`run/${run}/sample/${target}`);
    if (event.key === "Escape") location.hash = listed.run === run ? listed.hash : link(`run/${run}/samples`);
  }

  draw();
  document.addEventListener("keydown", keys);
  return () => document.removeEventListener("keydown", keys);
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
