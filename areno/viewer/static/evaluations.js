// Answers to the same held-out prompts in two evaluations, by default the first and the last.

import { coalesced, follow, get } from "./api.js";
import { keep } from "./app.js";
import { el, field, fill, number, plural, select } from "./dom.js";
import { visibleText } from "./tokens.js";

export async function show(page, { run, params }) {
  let before = params.get("before"), after = params.get("after");
  const body = el("div");
  fill(page, el("h1", {}, "Before and after"), body);

  function answer(title, record) {
    if (!record) return el("section", { class: "answer" }, el("h3", {}, title), el("p", { class: "muted" }, "not recorded"));
    const parts = Object.entries(record.reward_parts ?? {}).map(([name, value]) => ` · ${name} ${number(value)}`);
    return el("section", { class: "answer" },
      el("h3", {}, title),
      el("p", { class: "muted" }, `reward ${number(record.reward)}`, parts, ` · ${number(record.response_len)} tokens`,
        record.finish_reason === "length" && " · truncated"),
      el("pre", { class: "text" }, visibleText(record.completion)));
  }

  async function load() {
    const data = await get(`/api/runs/${run}/evaluations`, { before, after });
    if (!data.steps.length) {
      fill(body, el("p", {}, "This run has recorded no answers to held-out prompts. This page shows such answers if a run evaluates on held-out prompts."));
      return;
    }
    keep(`run/${run}/evaluations`, { before, after });
    const steps = data.steps.map((step) => [String(step), step ? `after ${plural(step, "step")}` : "before training"]);
    const label = (step) => (step ? `After ${plural(step, "step")}` : "Before training");
    fill(
      body,
      el("div", { class: "bar" },
        field("Before", select(steps, String(data.before), (step) => ((before = step), load()), { id: "before" })),
        field("After", select(steps, String(data.after), (step) => ((after = step), load()), { id: "after" }))),
      data.prompts.map((one) => el("article", { class: "card" },
        el("h2", {}, `Prompt ${one.prompt_index}`),
        el("pre", { class: "text prompt" }, visibleText(one.prompt)),
        el("div", { class: "pair" }, answer(label(data.before), one.before), answer(label(data.after), one.after)))),
    );
  }

  await load();
  const refresh = coalesced(async () => {
    if (!after) await load();
  }, 1000);
  return follow([run], ({ changed }) => (!changed || changed.includes("evaluations")) && refresh());
}
