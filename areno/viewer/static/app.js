// Shows the page that the URL names, and the navigation.

import { get } from "./api.js";
import { announce, el, fill } from "./dom.js";

const PAGES = { "": "./runs.js", curves: "./charts.js", diff: "./diff.js" };
const RUN_PAGES = [
  ["", "Overview", "./run.js"],
  ["curves", "Curves", "./charts.js"],
  ["samples", "Samples", "./samples.js"],
  ["sample", null, "./sample.js"],
  ["evaluations", "Before and after", "./evaluations.js"],
  ["timeline", "Timeline", "./timeline.js"],
  ["log", "Log", "./logs.js"],
];
const main = document.getElementById("main");
const names = new Map(); // names of runs by id
let close = null;
let shown = 0;

/** The runs that were chosen in the list, kept for this tab. */
export const chosen = {
  get: () => JSON.parse(sessionStorage.getItem("runs") ?? "[]"),
  set: (ids) => {
    sessionStorage.setItem("runs", JSON.stringify(ids));
    drawNavigation(route());
  },
};

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // malformed percent-encoding
  }
}

/** The parts of the URL's hash: `#/run/ID/samples?order=best`. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decoded);
  return { parts, run: parts[0] === "run" ? parts[1] : null, params: new URLSearchParams(query ?? "") };
}

/** A link's hash. */
export function link(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "" && item !== false) query.append(name, item);
    }
  }
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Unless another page is shown by now, keep the state of a page in the URL, without a new entry in the history. */
export function keep(path, params) {
  if (location.hash.split("?")[0] === link(path)) history.replaceState(null, "", link(path, params));
}

function drawNavigation({ parts, run }) {
  const item = (text, href, current) => el("a", { href, "aria-current": current ? "page" : null }, text);
  const runs = chosen.get();
  fill(
    document.getElementById("pages"),
    item("Runs", "#/", parts[0] === ""),
    runs.length > 0 && item(`Curves (${runs.length})`, link("curves", { run: runs }), parts[0] === "curves"),
    runs.length === 2 && item("Differences", link("diff", { left: runs[0], right: runs[1] }), parts[0] === "diff"),
  );
  const nav = document.getElementById("run-pages");
  nav.hidden = !run;
  if (run && !names.has(run)) get("/api/runs").then(({ runs: rows }) => {
    for (const row of rows) names.set(row.id, row.name);
    if (names.has(run)) drawNavigation(route());
  }, () => {});
  const page = parts[2] === "sample" ? "samples" : parts[2] ?? "";
  fill(nav, run && el("strong", {}, names.get(run) ?? ""), run && RUN_PAGES.filter(([, title]) => title).map(([name, title]) =>
    item(title, link(name ? `run/${run}/${name}` : `run/${run}`), name === page)));
}

async function show() {
  const here = route(), number = ++shown;
  close?.();
  close = null;
  drawNavigation(here);
  const file = here.run ? RUN_PAGES.find(([name]) => name === (here.parts[2] ?? ""))?.[2] : PAGES[here.parts[0]];
  const page = el("div", { class: "page" });
  fill(main, page);
  try {
    if (!file) throw new Error("There is no such page.");
    const module = await import(file);
    const end = await module.show(page, here);
    if (number !== shown) end?.();
    else close = end;
  } catch (error) {
    fill(page, el("h1", {}, "Not available"), el("p", { role: "alert", class: "problem" }, error.message),
      el("p", {}, el("a", { href: "#/" }, "All runs")));
  }
  if (number === shown) {
    const title = page.querySelector("h1")?.textContent ?? "";
    document.title = `${title} – areno view`;
    announce(title);
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => {
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  show();
});
show();
