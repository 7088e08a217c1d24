// Requests to the server, its events, and the key that it may ask for.

import { announce, el } from "./dom.js";

const RETRY_MS = 3000;

let asking = null;

function url(path, params) {
  const target = new URL(path, location.origin);
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") target.searchParams.append(name, item);
    }
  }
  return target;
}

/** The answer to a request, as data; throws an Error with the server's message. */
export async function get(path, params = {}) {
  const response = await fetch(url(path, params));
  if (response.status === 401) {
    asking ??= askKey().finally(() => (asking = null));
    await asking;
    return get(path, params);
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
  return body;
}

function askKey() {
  return new Promise((resolve) => {
    const input = el("input", { type: "password", autocomplete: "current-password", required: true, id: "key" });
    const problem = el("p", { role: "alert", class: "problem" });
    const form = el("form", { method: "dialog" },
      el("h1", {}, "API key"),
      el("p", {}, "This server needs an API key. Enter the key with which the server was started."),
      el("label", { for: "key" }, "Key"), input, problem,
      el("button", { type: "submit", class: "main" }, "Open"));
    const dialog = el("dialog", { "aria-label": "API key", on: { cancel: (event) => event.preventDefault() } }, form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const response = await fetch("/api/login", { method: "POST", body: input.value }).catch(() => null);
      if (response?.ok) {
        dialog.close();
        dialog.remove();
        resolve();
      } else problem.textContent = response ? "This is not the API key of the server." : "The server does not answer.";
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Show why the page is not updated; an empty text hides the message. */
function showProblem(text) {
  const problem = document.getElementById("problem");
  problem.hidden = !text;
  if (problem.textContent !== text) problem.textContent = text;
}

/**
 * Call `change({run, changed})` on new data of runs, or of the list of runs if none are passed, and with `{changed: null}` on
 * each connection. The connection is closed while the tab is hidden, because browsers allow only a few. Returns a function that
 * stops the calls.
 */
export function follow(runs, change) {
  let source = null, retry = null, ended = false;
  const live = document.getElementById("live");
  const state = (text) => {
    if (live.textContent !== text && text === "disconnected") announce("The connection to the server is lost");
    live.textContent = text;
    live.className = text === "live" ? "connected" : text;
  };
  const tell = async (data) => {
    const text = await Promise.resolve(change(data)).then(() => "", (error) => `This page is no longer updated: ${error.message}`);
    if (!ended) showProblem(text);
  };
  const open = () => {
    const opened = (source = new EventSource(url("/api/events", { run: runs })));
    opened.onmessage = (event) => {
      const data = JSON.parse(event.data);
      state("live");
      tell(data.run ? data : { changed: null });
    };
    opened.onerror = () => {
      if (opened !== source) return;
      state("disconnected");
      if (opened.readyState === EventSource.CLOSED) refused();
    };
  };
  /** The browser does not retry a refused connection: the server has restarted and wants its key, or a run is gone. */
  const refused = () => {
    source = null;
    clearTimeout(retry);
    retry = setTimeout(async () => {
      await get("/api/runs").catch(() => {}); // asks for the key
      if (!ended) visible();
    }, RETRY_MS);
  };
  const visible = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) open();
  };
  document.addEventListener("visibilitychange", visible);
  visible();
  return () => {
    ended = true;
    clearTimeout(retry);
    document.removeEventListener("visibilitychange", visible);
    source?.close();
    state("");
    showProblem("");
  };
}

/** Wrap asynchronous work: it never runs twice at once, runs `gap` ms apart, and runs again if it is called meanwhile. */
export function coalesced(work, gap = 0) {
  let running = false, again = false;
  return async function run() {
    if (running) {
      again = true;
      return;
    }
    running = true;
    try {
      await work();
      if (gap) await new Promise((resolve) => setTimeout(resolve, gap));
    } finally {
      running = false;
    }
    if (again) {
      again = false;
      await run();
    }
  };
}
