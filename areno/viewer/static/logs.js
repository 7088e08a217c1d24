// The end of a log, and new lines as they are written.

import { coalesced, follow, get } from "./api.js";
import { keep } from "./app.js";
import { el, field, fill, select } from "./dom.js";

const MOST_LINES = 5000;
const MOST_BEHIND = 2 ** 20; // bytes; if more are unread, as after a night in the background, they are skipped
const LEVELS = ["all", "WARNING", "ERROR"];
const RANKS = { error: 2, warning: 1 };

export async function show(page, { run, params }) {
  const log = new Log(run, Number(params.get("file")) || 0);
  fill(page, el("h1", {}, "Log"), log.elements());
  await log.open();
  const newer = coalesced(() => log.newer(), 300);
  log.follows.addEventListener("change", () => log.follows.checked && newer());
  return follow([run], ({ changed }) => (!changed || changed.includes("log")) && newer());
}

const kind = (line) => (/\b(ERROR|CRITICAL)\b/.test(line) ? "error" : /\bWARNING\b/.test(line) ? "warning" : "");

class Log {
  follows = el("input", { type: "checkbox" });
  #files = [];
  #level = "all";
  #lines = [];
  #start = 0; // byte positions of the lines
  #end = 0;
  #isCut = false; // whether the first lines were dropped, so that the position of the first kept one is unknown
  #log = el("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log" });
  #earlier = el("button", { on: { click: () => this.#older() } }, "Earlier lines");
  #search = el("input", { type: "search", on: { input: () => this.#draw() } });
  #bar = el("div", { class: "bar" });
  #missing = el("p", { hidden: true }, "This run has no log yet.");

  constructor(run, file) {
    Object.assign(this, { run, file });
    this.follows.checked = true;
  }

  elements() {
    return [this.#missing, this.#bar, this.#earlier, this.#log];
  }

  /** Show the end of the log. */
  async open() {
    const answer = await this.#request();
    if (!answer) return;
    this.#take(answer, answer.lines);
    this.#files = answer.files;
    this.#isCut = false;
    keep(`run/${this.run}/log`, { file: this.file || null });
    this.#missing.hidden = this.#files.length > 0;
    this.#bar.hidden = this.#log.hidden = !this.#files.length;
    fill(this.#bar, this.#controls());
    this.#draw();
  }

  /** Add the lines written since; add none while the end is not followed and many lines are shown. */
  async newer() {
    if (!this.follows.checked && this.#lines.length >= MOST_LINES) return undefined; // read once the end is followed again
    const answer = await this.#request({ after: this.#end });
    if (!answer) return undefined;
    if (answer.files.join("\n") !== this.#files.join("\n")) { // their numbers may have changed
      this.file = Math.max(answer.files.indexOf(this.#files[this.file]), 0);
      return this.open();
    }
    const isReplaced = answer.size < this.#end, isBehind = this.follows.checked && answer.size - answer.end > MOST_BEHIND;
    if (isReplaced || isBehind) return this.open();
    if (!answer.lines.length) return undefined;
    this.#take({ start: this.#start, end: answer.end }, [...this.#lines, ...answer.lines]);
    if (this.follows.checked && this.#lines.length > MOST_LINES) {
      this.#lines = this.#lines.slice(-MOST_LINES);
      this.#isCut = true;
    }
    this.#draw();
    return answer.end < answer.size ? this.newer() : undefined;
  }

  async #older() {
    if (this.#isCut) await this.open();
    const answer = await this.#request({ before: this.#start });
    if (!answer) return;
    this.follows.checked = false;
    this.#take({ start: answer.start, end: this.#end }, [...answer.lines, ...this.#lines]);
    this.#draw();
  }

  /** A part of the file; null if another file was chosen meanwhile. */
  async #request(position = {}) {
    const { file } = this, answer = await get(`/api/runs/${this.run}/log`, { file, ...position });
    return file === this.file ? answer : null;
  }

  #take({ start, end }, lines) {
    this.#start = start;
    this.#end = end;
    this.#lines = lines;
  }

  #controls() {
    const files = this.#files.map((name, place) => [String(place), name]);
    const levels = LEVELS.map((name) => [name, name === "all" ? "all" : `${name} and above`]);
    const chooseFile = (value) => {
      this.file = Number(value);
      this.open();
    };
    const chooseLevel = (value) => {
      this.#level = value;
      this.#draw();
    };
    return [
      field("File", select(files, String(this.file), chooseFile, { id: "log-file" })),
      field("Level", select(levels, this.#level, chooseLevel, { id: "log-level" })),
      field("Filter lines", this.#search),
      el("label", { class: "check" }, this.follows, "Follow new lines"),
    ];
  }

  #draw() {
    let last = ""; // the level of the last line with a timestamp, which applies to the lines below it
    const words = this.#search.value.toLowerCase(), least = LEVELS.indexOf(this.#level);
    const some = this.#lines.filter((line) => {
      if (/^\d{4}-\d\d-\d\d /.test(line)) last = kind(line);
      return (RANKS[last] ?? 0) >= least && line.toLowerCase().includes(words);
    });
    fill(this.#log, some.map((line) => el("div", { class: kind(line) || null }, line || " ")));
    this.#earlier.hidden = this.#start === 0;
    if (this.follows.checked) this.#log.scrollTop = this.#log.scrollHeight;
  }
}
