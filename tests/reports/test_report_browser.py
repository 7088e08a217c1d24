"""The report in a real browser: opened from disk, narrow, dark, printed, and without console messages."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from areno.reports.report import write_report
from areno.reports.run_data import RunData
from tests.reports.browser import browse, served
from tests.reports.prepared import OPTIONS, Page, Prepared, policy_metrics, row, sample

pytestmark = pytest.mark.long
# A page of the same origin inspects the report, in which no script may run.
PROBE = """<!doctype html><meta charset="utf-8"><title>probe</title>
<iframe src="/run/report.html#%s" width="%d" height="2000" style="border:0"></iframe><pre id="result"></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, rect = (e) => e.getBoundingClientRect();
  const style = (selector) => view.getComputedStyle(page.querySelector(selector));
  const wide = [...page.querySelectorAll("main *")].filter((e) => !e.closest(".table, svg") && rect(e).right > %d + 1);
  document.getElementById("result").textContent = JSON.stringify({
    scroll: page.documentElement.scrollWidth, client: page.documentElement.clientWidth,
    wide: wide.map((e) => e.tagName + "." + e.className), background: style("body").backgroundColor,
    color: style("body").color, line: style("svg .s0").stroke, token: style("span.p").textDecorationLine,
    height: rect(page.querySelector("svg.chart")).height, scripts: view.evil === undefined,
    target: page.querySelector(":target")?.id, font: [...page.querySelectorAll("svg .text")].map((e) => rect(e).height),
  });
};
</script>
"""


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(0)
    evil = "</p></style><script>window.evil = 1</script><img src=x onerror='window.evil=1'>\u202e" + "x" * 300
    samples = [
        sample(step, index, 0, float(index), prompt=evil, rows=row([evil, " yes", "\n"], 1.0 - index))
        for step in range(8)
        for index in range(3)
    ]
    metrics = policy_metrics(rng, 200) | {
        "rollout/reward_parts/a_long_name_of_a_part_of_the_reward": np.linspace(0, 1, 200)
    }
    config = {**OPTIONS, "a_setting_with_quite_a_long_name": "/a/path/" + "folder/" * 40}
    written = Prepared(metrics, config, samples=samples).write(tmp_path / "run")
    written.append_warning(3, "word " * 100)
    write_report(RunData(written.path))
    return written


def probe(tmp_path, width, *options, anchor="verdict"):
    """What a script of the same origin sees of the report in a frame of this width."""
    (tmp_path / "probe.html").write_text(PROBE % (anchor, width, width))
    with served(tmp_path) as address:
        done = browse(f"{address}/probe.html", tmp_path, "--window-size=1300,2100", "--dump-dom", *options)
    return json.loads(Page(done.stdout).root.one("pre", id="result").text), console(done)


def console(done):
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_opened_from_disk_the_report_logs_nothing_and_runs_no_script_of_a_sample(run, tmp_path):
    done = browse(f"file://{run.report_path}", tmp_path, "--dump-dom")
    assert console(done) == []
    assert "window.evil" in Page(done.stdout).root.one("main").text
    assert not Page(done.stdout).root.all("script") + Page(done.stdout).root.all("img")
    broken = tmp_path / "broken.html"  # to see that the console reports scripts
    broken.write_text(run.report_path.read_text().replace("<main>", "<main><script>window.evil = 1</script>"))
    assert len(console(browse(f"file://{broken}", tmp_path, "--dump-dom"))) == 1


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(width, run, tmp_path):
    seen, messages = probe(tmp_path, width, anchor="sample-7-2-0")
    assert messages == []
    assert seen["scroll"] <= seen["client"] <= width
    assert seen["wide"] == []
    assert seen["height"] > 100
    assert seen["target"] == "sample-7-2-0"
    assert seen["token"] == "underline"
    assert seen["scripts"]
    assert min(seen["font"]) > 7, "chart labels are readable"


def luminance(color):
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_it_follows_the_color_scheme(run, tmp_path):
    light, _ = probe(tmp_path, 800)
    dark, _ = probe(tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert luminance(light["background"]) > 0.8 > 0.1 > luminance(dark["background"])
    for seen in (light, dark):
        assert contrast(seen["color"], seen["background"]) > 7
        assert contrast(seen["line"], seen["background"]) > 3


def test_it_can_be_printed(run, tmp_path):
    browse(f"file://{run.report_path}", tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
