"""Writes ``report.html``: a single file with the verdict, curves, samples and configuration of a run.

The page requires neither network nor JavaScript, and stays below 3 MB. The template engine escapes all text of a run, and
makes control characters and bidirectional marks visible.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from areno import __version__
from areno.errors import ArenoError
from areno.observability.chart import printable
from areno.reports import report_sections as sections
from areno.reports.ending import steps_done
from areno.reports.evidence import Evidence
from areno.reports.learning import HEADLINES
from areno.reports.run_data import RunData
from areno.reports.run_facts import data_sentence, memory_sentence, saved_sentence
from areno.reports.verdict import verdict_of
from areno.storage.run_dir import RunDirectory

_log = logging.getLogger(__name__)

MAX_BYTES = 3_000_000
"""Maximum size of a report, in bytes."""
_LARGEST = {
    "groups": "samples",
    "comparisons": "first and last answers",
    "config": "configuration",
    "warnings": "warnings",
}
REFRESH_S = 60.0
"""Minimum number of seconds between two reports of a run in progress."""
REFRESH_SHARE = 0.01
"""Maximum fraction of a run's time that reports may take while the run is in progress."""
_OPTION = re.compile(r"(?<![\w/.-])(--[a-z][a-z0-9-]*|[a-z]+(?:\.[a-z_]+)+=?(?=\s|[\w]))")
_TEMPLATES = Path(__file__).parent / "templates"


def report_html(run: RunData, evidence: Evidence | None = None) -> str:
    """Return the report of a run as an HTML page. If the page would reach ``MAX_BYTES``, large sections are omitted."""
    template, content = _environment().get_template("report.html.jinja"), _content(run, evidence or Evidence(run))
    html = template.render(content)
    for name, title in _LARGEST.items():  # texts are bounded, but escaping can make the page too large
        if len(html.encode(errors="replace")) < MAX_BYTES:
            break
        content[name] = None
        content["left_out"].append(title)
        html = template.render(content)
    return html


def _content(run: RunData, evidence: Evidence) -> dict[str, Any]:
    verdict = verdict_of(run, evidence)
    note, pairs = sections.comparisons(run, evidence.samples)
    status, steps = run.status, steps_done(run)
    environment = _environment()
    style = Markup(environment.loader.get_source(environment, "report.css")[0])  # type: ignore[union-attr]
    return {
        "name": run.name,
        "version": __version__,
        "written": sections.date(time.time()),
        "style": style,
        "style_hash": base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        "algorithm": run.config.get("algo") or run.config.get("experiment_name") or "run",
        "state": status.get("state") or "unknown",
        "started": sections.date(status["started"]) if "started" in status else "",
        "took": sections.duration(status["ended"] - status["started"]) if "ended" in status else "",
        "steps": steps,
        "facts_of_run": [line for line in (data_sentence(run, steps), saved_sentence(run)) if line],
        "memory": memory_sentence(run),
        "verdict": verdict,
        "headline": HEADLINES[verdict.learned.state],
        "left_out": [],
        "curves": list(sections.curves(run)),
        "comparison_note": note,
        "comparisons": pairs,
        "evaluation_option": evidence.advice.text(
            "--eval-interval" if evidence.advice.value("--eval-dataset-path") else "--eval-dataset-path"
        ),
        "times": sections.times(run),
        "groups": sections.sample_groups(evidence.samples, verdict.problems),
        "sample_count": len(evidence.samples),
        "warnings": sections.warnings(run),
        "warning_count": len(run.warnings),
        "config": sections.settings(run.config),
        "facts": list(sections.facts(run.environment)),
        "files": list(sections.files(run)),
    }


def write_report(run: RunData, out: str | Path | None = None, evidence: Evidence | None = None) -> Path:
    """Write the report of a run into its directory, or to the file ``out``. Return the path of the file.

    If ``evidence`` is None, the evidence is collected from the run. Raises ArenoError if the file cannot be written.
    """
    html = report_html(run, evidence)
    if out is None:
        run.files.write_report(html)
        return run.files.report_path
    try:
        Path(out).write_bytes(html.encode(errors="replace"))
    except OSError as error:
        raise ArenoError(f"--out {out} cannot be written: {error.strerror or error}; choose another file") from error
    return Path(out)


@contextmanager
def report_at_end(run_dir: RunDirectory) -> Iterator[None]:
    """Write the report when the block ends, even after an error. If the report cannot be written, only log the failure."""
    try:
        yield
    finally:
        if _written(run_dir):
            _log.info("report: %s", run_dir.report_path)


class ReportRefresher:
    """Periodically rewrites the report of a run in progress. The interval is long enough not to slow down training."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir
        self._due = time.monotonic() + REFRESH_S

    def refresh(self) -> None:
        """Rewrite the report if it is due (see ``REFRESH_S`` and ``REFRESH_SHARE``).

        If the report cannot be written, only log the failure.
        """
        start = time.monotonic()
        if start >= self._due:
            _written(self._run_dir)
            took = time.monotonic() - start
            self._due = start + max(REFRESH_S, took / REFRESH_SHARE)


def _written(run_dir: RunDirectory) -> bool:
    try:
        write_report(RunData(run_dir.path))
    except Exception as error:  # a report must never end a run
        _log.warning("the report was not written: %s: %s", type(error).__name__, error)
        return False
    return True


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    environment.filters["advice"] = _advice
    return environment


def _advice(text: str) -> Markup:
    """Mark the names of options in a text as code, so that the page does not break a name across lines."""
    return Markup(_OPTION.sub(r"<code>\1</code>", str(escape(_visible(text)))))


def _visible(value: Any) -> Any:
    """Make control characters and bidirectional marks of a text visible. Return markup unchanged."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return printable(value)
