// The end of a log, and its lines as they are written.

import { coalesced, follow, get } from "./api.js";
import { keep } from "./app.js";
import { el, field, fill, select } from "./dom.js";

const MOST_LINES = 5000;
const MOST_BEHIND = 2 ** 20; // bytes that are skipped, not followed, as after a night in the background
const LEVELS = ["all", "WARNING", "ERROR"];

export async function show(page, { run, params }) {
  let file = Number(params.get("file")) || 0, files = [], level = "all", words = "";
  let start = 0, end = 0, lines = [], cut = false;
  const log = el("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log" });
  const earlier = el("button", { on: { click: older } }, "Earlier lines");
  const follows = coalesced(newer, 300);
  const box = el("input", { type: "checkbox", on: { change: () => box.checked && follows() } });
  box.checked = true;
  const search = el("input", { type: "search", on: { input: () => ((words = search.value.toLowerCase()), draw()) } });
  const bar = el("div", { class: "bar" });
  const missing = el("p", { hidden: true }, "This run has no log yet.");
  fill(page, el("h1", {}, "Log"), missing, bar, earlier, log);

  const kind = (line) => (/\b(ERROR|CRITICAL)\b/.test(line) ? "error" : /\bWARNING\b/.test(line) ? "warning" : "");
  const rank = { all: 0, WARNING: 1, ERROR: 2 };

  function draw() {
    let last = ""; // lines without a level belong to the one before
    const some = lines.filter((line) => {
      if (/^\d{4}-\d\d-\d\d /.test(line)) last = kind(line);
      const high = last === "error" ? 2 : last === "warning" ? 1 : 0;
      return high >= rank[level] && line.toLowerCase().includes(words);
    });
    fill(log, some.map((line) => el("div", { class: kind(line) || null }, line || " ")));
    earlier.hidden = start === 0;
    if (box.checked) log.scrollTop = log.scrollHeight;
  }

  async function open() {
    const asked = file, answer = await get(`/api/runs/${run}/log`, { file });
    if (asked !== file) return; // another file was chosen meanwhile
    ({ start, end, lines, files } = answer);
    cut = false;
    keep(`run/${run}/log`, { file: file || null });
    missing.hidden = files.length > 0;
    bar.hidden = log.hidden = !files.length;
    fill(
      bar,
      field("File", select(files.map((name, place) => [String(place), name]), String(file), (value) => {
        file = Number(value);
        open();
      }, { id: "log-file" })),
      field("Level", select(LEVELS.map((name) => [name, name === "all" ? "all" : `${name} and above`]), level, (value) => ((level = value), draw()), { id: "log-level" })),
      field("Filter lines", search),
      el("label", { class: "check" }, box, "Follow"),
    );
    draw();
  }

  async function older() {
    if (cut) await open(); // where the first kept line begins is not known
    const asked = file, answer = await get(`/api/runs/${run}/log`, { file, before: start });
    if (asked !== file) return;
    box.checked = false;
    start = answer.start;
    lines = [...answer.lines, ...lines];
    draw();
  }

  async function newer() {
    if (!box.checked && lines.length >= MOST_LINES) return undefined; // read when it follows again
    const asked = file, answer = await get(`/api/runs/${run}/log`, { file, after: end });
    if (asked !== file) return undefined;
    if (answer.files.join("\n") !== files.join("\n")) { // their numbers may have changed
      file = Math.max(answer.files.indexOf(files[file]), 0);
      return open();
    }
    const replaced = answer.size < end, behind = box.checked && answer.size - answer.end > MOST_BEHIND;
    if (replaced || behind) return open();
    if (!answer.lines.length) return undefined;
    end = answer.end;
    lines = [...lines, ...answer.lines];
    if (box.checked && lines.length > MOST_LINES) {
      lines = lines.slice(-MOST_LINES);
      cut = true;
    }
    draw();
    return answer.end < answer.size ? newer() : undefined;
  }

  await open();
  return follow([run], ({ changed }) => (!changed || changed.includes("log")) && follows());
}
