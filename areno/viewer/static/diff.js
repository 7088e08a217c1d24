// What differs between the configurations and environments of two runs.

import { get } from "./api.js";
import { keep, link } from "./app.js";
import { el, field, fill, select, shown, table } from "./dom.js";

export async function show(page, { params }) {
  const { runs } = await get("/api/runs");
  const names = runs.map((row) => [row.id, row.path]);
  let left = params.get("left") ?? runs[0]?.id, right = params.get("right") ?? runs[1]?.id;
  if (!left || !right) throw new Error("Two runs are needed to show what differs.");
  const name = (id) => names.find(([key]) => key === id)?.[1] ?? id;
  const body = el("div");

  fill(
    page,
    el("h1", {}, "What differs"),
    el("div", { class: "bar" },
      field("Left", select(names, left, (id) => ((left = id), load()))),
      field("Right", select(names, right, (id) => ((right = id), load()))),
      el("a", { class: "button", href: link("curves", { run: [left, right] }) }, "Curves")),
    body,
  );

  function part(title, answer) {
    const code = (value) => (value === undefined ? el("span", { class: "muted" }, "absent") : el("code", {}, shown(value)));
    const rows = [
      ...answer.different,
      ...answer.left_only,
      ...answer.right_only,
    ].map((one) => [el("code", {}, one.name), el("del", {}, code(one.left)), el("ins", {}, code(one.right))]);
    const count = `${answer.different.length} differ, ${answer.left_only.length} only left, ` +
      `${answer.right_only.length} only right, ${answer.equal} are equal.`;
    return [
      el("h2", {}, title),
      el("p", {}, count),
      rows.length > 0 && table(title, ["Name", name(left), name(right)], rows, { class: "diff" }),
    ];
  }

  async function load() {
    keep("diff", { left, right });
    const answer = await get("/api/diff", { left, right });
    fill(body, part("Configuration", answer.config), part("Environment", answer.environment));
  }

  await load();
}
