// The tokens of a training row, colored by one of their values, and where the rows of a sample fork.

import { el, field, fill, number, select, table } from "./dom.js";

const COLORS = [
  ["advantage", "advantage"],
  ["logprob", "log-prob"],
  ["trained", "whether trained"],
  ["version", "weight version"],
  ["role", "role"],
];
const LOGPROB_BOUNDS = [0.05, 0.5, 1.5, 3, 6];
const STEPS = 4; // color levels for each sign of the advantage
const VERSIONS = 6;

/** The rows of a record as lists of tokens. */
export function rowsOf(rows) {
  return rows.map((segments) => segments.flatMap((segment) => segment.tokens.map((id, place) => ({
    id,
    text: segment.texts[place],
    logprob: segment.logprobs[place],
    inTraining: segment.train_logprobs?.[place] ?? null,
    advantage: segment.advantages[place],
    clipped: Boolean(segment.clipped?.[place]),
    role: segment.role,
    turn: segment.turn,
    trained: segment.trained,
    version: segment.version,
    sampled: segment.version >= 0 || segment.role === "text" || segment.role === "call",
  }))));
}

/**
 * Where each row forks: `parent` (the earlier row with the longest common prefix, or null), `at` (length of the prefix),
 * `until` (the end of the edited prompt: the first sampled token after it), `turn`.
 */
export function forksOf(rows) {
  return rows.map((row, place) => {
    let parent = null, at = 0;
    rows.slice(0, place).forEach((other, index) => {
      let length = 0;
      while (length < row.length && length < other.length && row[length].id === other[length].id) length++;
      if (length > at) [parent, at] = [index, length];
    });
    if (parent === null) return { parent, at: 0, until: 0, turn: 0 };
    let until = at;
    while (until < row.length && !row[until].sampled) until++;
    return { parent, at, until, turn: row[Math.min(at, row.length - 1)].turn };
  });
}

/** Text with control characters made visible, except line breaks and tabs. */
export function visibleText(text) {
  return String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f]/g, (char) => String.fromCharCode(0x2400 + char.charCodeAt(0)))
    .replace(/[\u007f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function level(token, color, scale) {
  if (color === "role") return `role-${token.role}`;
  if (color === "trained" || (!token.sampled && !token.trained)) return token.trained ? "is-trained" : "context";
  if (color === "version") return `version-${Math.max(token.version, 0) % VERSIONS}`;
  if (color === "logprob") return `p-${LOGPROB_BOUNDS.filter((bound) => -token.logprob > bound).length}`;
  const size = scale ? Math.min(Math.ceil((Math.abs(token.advantage) / scale) * STEPS - 1e-9), STEPS) : 0;
  return size === 0 ? "a-0" : `a-${token.advantage > 0 ? "plus" : "minus"}-${size}`;
}

function legend(row, color, scale) {
  const sample = (name, text) => el("li", {}, el("span", { class: `token ${name}` }, "abc"), ` ${text}`);
  const always = [sample("context", "context, not sampled"), sample("trained", "underlined: trained"), sample("masked", "dotted: sampled, but not trained")];
  const unique = (name) => [...new Set(row.map((token) => token[name]))];
  const items = {
    advantage: () => [sample(`a-minus-${STEPS}`, `advantage −${number(scale)}: training makes the token less likely`), sample("a-0", "0"),
      sample(`a-plus-${STEPS}`, `advantage ${number(scale)}: training makes the token more likely`)],
    logprob: () => [0, ...LOGPROB_BOUNDS].map((bound, place) =>
      sample(`p-${place}`, place ? `log-prob below −${bound} (probability below ${number(Math.exp(-bound))})` : `log-prob of at least −${LOGPROB_BOUNDS[0]}`)),
    trained: () => [sample("is-trained", "trained")],
    version: () => unique("version").filter((version) => version >= 0).map((version) => sample(`version-${version % VERSIONS}`, `version ${version}`)),
    role: () => unique("role").map((role) => sample(`role-${role}`, role)),
  }[color]();
  return el("ul", { class: "legend", "aria-label": "Colors" }, items, always);
}

/** The tokens of a row as colored text, with a legend, the values of the current token, and a table of all tokens. */
export function tokenView(row, fork, { color, change }) {
  const scale = Math.max(0, ...row.filter((token) => token.trained).map((token) => Math.abs(token.advantage)).filter(Number.isFinite));
  const details = el("p", { class: "token-details", "aria-live": "polite" }, "Choose a token with the pointer or the arrow keys.");
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens. The arrow keys choose the previous or next token; Home and End choose the first or last token." });
  let current = -1, folded = fork.parent !== null && fork.at > 20 ? fork.at : 0;

  function text(token) {
    return visibleText(token.text).replace(/\n/g, "⏎\n").replace(/\t/g, "→\t");
  }

  function draw() {
    const spans = row.slice(folded).map((token, offset) => {
      const place = folded + offset;
      const names = ["token", level(token, color, scale), token.trained ? "trained" : token.sampled ? "masked" : null];
      if (fork.parent !== null && place >= fork.at && place < fork.until) names.push("edited");
      return el("span", { class: names.filter(Boolean).join(" "), "data-place": place }, text(token));
    });
    fill(box, folded > 0 && el("button", { class: "fold", on: { click: () => ((folded = 0), draw(), box.focus()) } },
      `Show the ${folded} tokens that are the same as in branch ${fork.parent + 1}`), spans);
  }

  function choose(place) {
    if (place < folded || place >= row.length) return;
    box.querySelector(".current")?.classList.remove("current");
    current = place;
    const token = row[place];
    const span = box.querySelector(`[data-place="${place}"]`);
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    const training = token.inTraining === null ? "" : `, log-prob in training ${number(token.inTraining)} (difference ${number(token.inTraining - token.logprob)})`;
    const numbers = token.sampled || token.trained
      ? `, log-prob ${number(token.logprob)} (probability ${number(Math.exp(token.logprob))})${training}, advantage ${number(token.advantage)}` +
        `${token.clipped ? ", clipped" : ""}, version ${token.version}`
      : "";
    details.textContent = `Token ${place + 1} of ${row.length}: “${text(token)}” (id ${token.id}), ${token.role}, turn ${token.turn + 1}, ` +
      `${token.trained ? "trained" : token.sampled ? "sampled, not trained" : "context"}${numbers}`;
  }

  box.addEventListener("keydown", (event) => {
    const target = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: folded, End: row.length - 1 }[event.key];
    if (target === undefined || event.target !== box) return;
    event.preventDefault();
    choose(Math.max(target, folded));
  });
  box.addEventListener("click", (event) => {
    const place = event.target.closest("[data-place]")?.dataset.place;
    if (place !== undefined) choose(Number(place));
  });
  draw();
  const all = el("details", { on: { toggle: () => all.open && all.children.length === 1 && all.append(tokenTable(row, text)) } },
    el("summary", {}, "All tokens as a table"));
  return el("div", {}, el("div", { class: "bar" }, field("Color by", select(COLORS, color, change, { id: "color" }))), legend(row, color, scale), box, details, all);
}

function tokenTable(row, text) {
  const heads = ["Token", "Text", "Role", "Turn", "Trained", "Log-prob", "Log-prob in training", "Advantage", "Clipped", "Version"];
  return table("Tokens", heads, row.map((token, place) => {
    const sampled = token.sampled || token.trained;
    return [String(place + 1), el("code", {}, text(token)), token.role, String(token.turn + 1), token.trained ? "yes" : "no",
      sampled ? number(token.logprob) : "–", number(token.inTraining), sampled ? number(token.advantage) : "–", token.clipped ? "yes" : "no",
      token.version < 0 ? "–" : String(token.version)];
  }));
}
