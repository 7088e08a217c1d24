"""How fast ``areno view`` opens a long run, of 10,000 steps and 1,000,000 samples by default, and how much memory it takes.

    python benchmarks/viewer.py [--steps N] [--samples N] [--folder FOLDER] [--save NAME]

``first_page_s``: from the first request of a fresh server to the last byte of the page's files, the list of runs, the
overview, eight curves and the newest samples, one after the other. ``rss_mib``: peak resident memory of the server,
including sorting the samples by reward, filtering and searching them. With Chromium, ``browser_s`` is the time until the
page of a fresh server shows curves and then samples.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import machine  # noqa: E402

from areno.storage.run_dir import RunDirectory  # noqa: E402
from tests.support.browser import browser  # noqa: E402

CURVES = ("reward", "eval_reward", "loss", "entropy", "response_length", "grad_norm", "logprob_gap", "staleness")
METRICS = (
    "rollout/rewards_mean", "train/loss", "train/entropy", "rollout/response_len_mean", "train/grad_norm",
    "train/logp_abs_diff_mean", "train/staleness_mean", *(f"train/other_{number}" for number in range(53)),
)  # fmt: skip


def make_run(folder: Path, steps: int, samples: int) -> RunDirectory:
    """Write a run with the writers that a real run uses."""
    run, draw = RunDirectory(folder).create(), random.Random(0)
    run.write_config("algo: grpo\nckpt: /models/base\n")
    run.write_status({"state": "finished", "started": time.time() - steps, "ended": time.time()})
    each = samples // steps
    for step in range(steps):
        run.append_metrics(step, {name: draw.random() for name in METRICS})
        run.append_samples(_sample(step, number, draw.random()) for number in range(each))
    return run


def _sample(step: int, number: int, reward: float) -> dict[str, Any]:
    words = f"step {step} number {number} "
    return {
        "step": step,
        "prompt_index": number // 3,
        "sample_index": number % 8,
        "picked": [("first", "best", "worst")[number % 3]],
        "reward": reward,
        "advantage": reward - 0.5,
        "finish_reason": "stop",
        "response_len": 64,
        "logprob_mean": -1.0,
        "prompt": f"What is {step} plus {number}?",
        "completion": (words * 8)[:160],
    }


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str]]:
    """Process id and URL of a fresh server on a folder."""
    command = [sys.executable, "-m", "areno", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"at (http://\S+)", process.stdout.readline())
            assert match is not None
            httpx.get(f"{match[1]}/icon.svg", timeout=60)  # it has started
            yield process.pid, match[1]
        finally:
            process.terminate()


def measure(folder: Path) -> dict[str, Any]:
    """Open the one run of a folder by requests, and again in a browser, each time with a fresh server."""
    with served(folder) as (process, url), httpx.Client(base_url=url, timeout=120) as session:
        result: dict[str, Any] = {"first_page_s": _first_page(session), **_heavier_requests(session)}
        status = Path(f"/proc/{process}/status").read_text()
        result["rss_mib"] = round(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024)
    with served(folder) as (_, url):
        result["browser_s"] = _in_browser(url)
    return result


def _first_page(session: httpx.Client) -> float:
    begin = time.perf_counter()
    for path in ("/", "/app.js", "/charts.js", "/plot.js", "/samples.js", "/vendor/uPlot.esm.js"):
        session.get(path).raise_for_status()
    run = session.get("/api/runs").raise_for_status().json()["runs"][0]["id"]
    session.get(f"/api/runs/{run}").raise_for_status()
    series = session.get(f"/api/runs/{run}/metrics", params={"name": CURVES}).raise_for_status().json()["series"]
    page = session.get(f"/api/runs/{run}/samples").raise_for_status().json()
    assert len(series) == len(CURVES) - 1, "no evaluations"
    assert len(page["samples"]) == 50
    return round(time.perf_counter() - begin, 3)


def _heavier_requests(session: httpx.Client) -> dict[str, float]:
    run = session.get("/api/runs").json()["runs"][0]["id"]
    result = {}
    queries: dict[str, dict[str, str | int | float]] = {
        "sort_s": {"order": "best"},
        "filter_s": {"flag": "worst", "reward_min": 0.4, "reward_max": 0.41},
        "search_s": {"text": "step 0 number 1 ", "order": "oldest"},
    }
    for name, query in queries.items():
        begin = time.perf_counter()
        assert session.get(f"/api/runs/{run}/samples", params=query).raise_for_status().json()["samples"]
        result[name] = round(time.perf_counter() - begin, 3)
    return result


def _in_browser(url: str) -> float | None:
    """Seconds from opening the curves of a run until their numbers and then its samples are shown; None without Chromium."""
    if shutil.which("chromium") is None:
        return None
    run = httpx.get(f"{url}/api/runs").json()["runs"][0]["id"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder)) as page:
        begin = time.perf_counter()
        page.open(f"{url}/#/run/{run}/curves")
        page.wait("document.querySelectorAll('.chart .value').length >= 7")
        page.run(f"location.hash = '#/run/{run}/samples'")
        page.wait("document.querySelectorAll('.samples li').length === 50")
        return round(time.perf_counter() - begin, 3)


def main() -> None:
    """Make a run unless the folder has one, measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to keep the run; it is made only once")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "run").exists():
            make_run(folder / "run", options.steps, options.samples)
        result = {"steps": options.steps, "samples": options.samples, **machine(), **measure(folder)}
    text = json.dumps(result)
    if options.save:
        (ROOT / "benchmarks" / "results" / f"{options.save}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
