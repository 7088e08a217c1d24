"""Makes the pictures of docs/view.md: ``python -m tests.viewer.pictures FOLDER``.

``FOLDER`` contains runs of ``areno quickstart``, a run of ``areno run`` with traced sessions, and in ``evaluated`` a run with
evaluations.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import httpx

from areno.storage.run_dir import RunDirectory
from tests.support.browser import Page, browser
from tests.viewer.stage import agent_sample, serving

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main(source: Path) -> None:
    """Take a picture of each page."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.chdir(temporary)
        folder = Path("runs")
        for config in sorted(source.rglob("config.yaml")):
            ignored = shutil.ignore_patterns("checkpoints", "events")
            shutil.copytree(config.parent, folder / config.parent.relative_to(source), ignore=ignored)
        agent = RunDirectory(folder / "calculator").create()
        agent.write_config("algo: grpo\nckpt: /models/calculator\n")
        agent.append_samples([agent_sample(12)])
        with serving(folder) as url, browser(Path(temporary, "profile")) as page:
            take(page, url)


def take(page: Page, url: str) -> None:
    """Open the pages of a viewer and take screenshots."""
    rows = httpx.get(f"{url}/api/runs").json()["runs"]
    gspo = [row["id"] for row in rows if row["name"] == "gspo"]
    both = "&".join(f"run={run}" for run in gspo)
    asynchronous = next(row["id"] for row in rows if row["kind"] == "experiment")
    evaluated = next(row["id"] for row in rows if row["name"] == "evaluated")
    agent = next(row["id"] for row in rows if row["name"] == "calculator")
    pages = {
        "curves": (
            f"/#/curves?{both}&smooth=0.6",
            780,
            f"document.querySelectorAll('figure .value').length >= {4 * len(gspo)}",
        ),
        "differences": (f"/#/diff?left={gspo[0]}&right={gspo[1]}", 780, "document.querySelector('main table')"),
        "run": (f"/#/run/{gspo[0]}", 780, "document.querySelector('main dl, main table')"),
        "samples": (f"/#/run/{gspo[0]}/samples", 700, "document.querySelectorAll('main li, main tbody tr').length > 3"),
        "evaluations": (
            f"/#/run/{evaluated}/evaluations",
            700,
            "document.querySelectorAll('main select').length > 0",
        ),
        "timeline": (f"/#/run/{asynchronous}/timeline", 700, "document.querySelector('rect.session')"),
        "log": (f"/#/run/{gspo[0]}/log", 560, "document.querySelector('main pre, main ol')"),
        "sample": (f"/#/run/{agent}/sample/0", 1280, "document.querySelector('.tokens')"),
        "runs": ("", 520, f"document.querySelectorAll('tbody tr').length === {len(rows)}"),
    }
    for name, (path, height, ready) in pages.items():
        page.open("about:blank")
        page.size(1200 if name != "sample" else 1000, height)
        page.open(url + path)
        page.wait(ready)
        time.sleep(1)
        if name == "sample":
            page.run("document.querySelector('.tokens').focus()")
            page.press("End")
        page.screenshot(PICTURES / f"view-{name}.png")
    page.open("about:blank")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
