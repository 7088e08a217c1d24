"""Makes the pictures of docs/view.md from runs of ``areno quickstart``: ``python -m tests.viewer.pictures FOLDER``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import httpx

from areno.storage.run_dir import RunDirectory
from tests.support.browser import browser
from tests.viewer.stage import agent_sample, serving

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main(source: Path) -> None:
    """Take a picture of the list of runs with their curves, and of a sample of an agent."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.chdir(temporary)
        folder = Path("runs")
        for config in sorted(source.glob("*/*/config.yaml")):
            ignored = shutil.ignore_patterns("checkpoints", "events")
            shutil.copytree(config.parent, folder / config.parents[1].name / config.parent.name, ignore=ignored)
        agent = RunDirectory(folder / "calculator").create()
        agent.write_config("algo: grpo\nckpt: /models/calculator\n")
        agent.append_samples([agent_sample(12)])
        with serving(folder) as url, browser(Path(temporary, "profile")) as page:
            rows = httpx.get(f"{url}/api/runs").json()["runs"]
            gspo = [row["id"] for row in rows if row["name"] == "gspo"]
            page.size(1200, 780)
            page.open(f"{url}/#/curves?" + "&".join(f"run={run}" for run in gspo) + "&smooth=0.6")
            page.wait(f"document.querySelectorAll('figure .value').length >= {4 * len(gspo)}")
            time.sleep(1)
            page.screenshot(PICTURES / "view-curves.png")
            page.open("about:blank")
            page.open(url)
            page.size(1200, 460)
            page.wait(f"document.querySelectorAll('tbody tr').length === {len(rows)}")
            page.screenshot(PICTURES / "view-runs.png")
            run = next(row["id"] for row in rows if row["name"] == "calculator")
            page.size(1000, 1280)
            page.open(f"{url}/#/run/{run}/sample/0")
            page.wait("document.querySelector('.tokens')")
            page.run("document.querySelector('.tokens').focus()")
            page.press("End")
            page.screenshot(PICTURES / "view-sample.png")
            page.open("about:blank")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
