"""The page of a run that has just started: missing data appears later, and the user is not disturbed."""

from __future__ import annotations

import json
import shutil
import time

import httpx
import pytest

from tests.viewer.stage import run_id, serving, write_run
from tests.viewer.test_browser import PROMISED_S, show

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=0)


@pytest.fixture
def address(run):
    with serving(run.path.parent) as url, httpx.Client(base_url=url) as session:
        yield f"{url}/#/run/{run_id(session, 'run')}"


def test_curves_appear_with_the_first_metrics_and_later_ones(page, run, address):
    run.metrics_path.unlink()
    show(page, f"{address}/curves")
    assert "No metrics are recorded yet" in page.text()
    run.append_metrics(0, {"rollout/rewards_mean": 0.25})
    page.wait("document.querySelectorAll('figure canvas').length === 1", PROMISED_S)
    run.append_metrics(1, {"rollout/rewards_mean": 0.5, "eval/rewards_mean": 0.75})
    page.wait("document.querySelectorAll('figure canvas').length === 2", PROMISED_S)
    page.run("document.querySelector('details.metrics').open = true")
    names = page.run("[...document.querySelectorAll('.picker label')].map(label => label.innerText)")
    assert {"eval_reward", "eval/rewards_mean"} <= set(names)
    page.open("about:blank")


def test_a_log_appears_once_it_is_written(page, run, address):
    run.log_path.unlink()
    show(page, f"{address}/log")
    assert "no log yet" in page.text()
    run.log_path.write_text("the first line\n")
    page.wait("document.querySelector('.log').innerText.includes('the first line')", PROMISED_S)
    assert "no log yet" not in page.text()
    page.open("about:blank")


def test_sessions_appear_once_they_are_written(page, run, address):
    show(page, f"{address}/timeline")
    assert "no traces yet" in page.text()
    path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    session = {"task_id": 0, "session_id": 0, "submit_ts": 1.0, "finalized_ts": 2.0, "status": "accepted", "phases": {}}
    path.write_text(json.dumps(session) + "\n")
    page.wait("document.querySelectorAll('rect.session').length === 1", 2 * PROMISED_S)
    assert "no traces yet" not in page.text()
    page.open("about:blank")


def test_all_sessions_of_a_window_are_in_the_table(page, run, address):
    path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    session = {"submit_ts": 1.0, "finalized_ts": 2.0, "status": "accepted", "phases": {}}
    path.write_text(json.dumps({"task_id": 0, "session_id": 0, **session}) + "\n")
    show(page, f"{address}/timeline")
    page.wait("document.querySelector('main').innerText.includes(': 1 session. ')")
    with open(path, "a") as file:
        file.writelines(json.dumps({"task_id": n, "session_id": n, **session}) + "\n" for n in range(1, 150))
    page.wait("document.querySelector('main').innerText.includes(': 150 sessions. ')", 2 * PROMISED_S)
    assert page.run("document.querySelectorAll('.timeline ~ details tbody tr').length") == 150
    page.open("about:blank")


def test_samples_that_arrived_before_a_click_on_more_are_still_offered(page, run, address):
    def append(count):
        run.append_samples({"step": 0, "prompt_index": n, "reward": 1.0, "completion": "c"} for n in range(count))

    fresh = "[...document.querySelectorAll('main button')].find(one => one.innerText.startsWith('Show '))"
    append(120)
    show(page, f"{address}/samples")
    page.wait("document.querySelectorAll('.samples li').length === 50")
    append(3)
    page.wait(f"{fresh}?.innerText === 'Show 3 new samples'", 2 * PROMISED_S)
    page.run("[...document.querySelectorAll('main button')].find(one => one.innerText === 'More').click()")
    page.wait("document.querySelectorAll('.samples li').length === 100")
    append(2)
    page.wait(f"{fresh}?.innerText === 'Show 5 new samples'", 2 * PROMISED_S)
    page.run(f"{fresh}.click()")
    page.wait("document.querySelector('main').innerText.includes('50 of 125 samples are shown')")
    page.open("about:blank")


def test_a_new_log_line_does_not_redraw_answers(page, run, address):
    run.append_eval_samples([{"step": 0, "prompt_index": 0, "prompt": "Q", "completion": "A"}])
    show(page, f"{address}/evaluations")
    page.wait("document.getElementById('live').innerText === 'live'")
    time.sleep(1.5)  # the page draws what the new connection requested
    page.run("document.querySelector('main select').dataset.mark = 'kept'")
    with open(run.log_path, "a") as file:
        file.write("another line\n")
    time.sleep(2.5)
    assert page.run("document.querySelector('main select').dataset.mark") == "kept"
    assert "undefined" not in page.text()
    page.open("about:blank")


def test_a_page_that_was_left_does_not_change_the_url(page, run, address):
    show(page, f"{address}/samples")
    before = page.run("location.hash")
    page.run("import('/app.js').then(app => app.keep('curves', { run: 'other' }))")
    assert page.run("location.hash") == before
    page.open("about:blank")


def test_a_missing_run_does_not_hide_the_others(page, run, address):
    run.append_metrics(0, {"rollout/rewards_mean": 0.25})
    url, shown = address.split("/#/run/")
    show(page, f"{url}/#/curves?run={shown}&run=0000000000000000")
    page.wait("document.querySelectorAll('figure canvas').length >= 1")
    assert "1 run cannot be shown: there is no such run" in page.text()
    page.open("about:blank")
    page.problems[:] = [text for text in page.problems if "404" not in text]  # the browser logs the 404


def test_a_page_says_when_its_run_was_deleted(page, run, address):
    run.append_metrics(0, {"rollout/rewards_mean": 0.25})
    show(page, f"{address}/curves")
    page.wait("document.getElementById('live').innerText === 'live'")
    assert page.run("document.getElementById('problem').hidden")
    shutil.rmtree(run.path)
    page.wait("document.getElementById('problem').innerText.includes('there is no such run')", 2 * PROMISED_S)
    page.run("location.hash = '#/'")
    page.wait("document.querySelector('h1').innerText === 'Runs' && document.getElementById('problem').hidden")
    page.open("about:blank")
    page.problems[:] = [text for text in page.problems if "404" not in text]


def test_the_focus_stays_when_a_page_is_redrawn(page, run, address):
    run.append_eval_samples({"step": step, "prompt_index": 0, "prompt": "Q", "completion": "A"} for step in (0, 1, 2))
    show(page, f"{address}/evaluations")
    page.run("document.querySelectorAll('main select')[1].focus()")
    page.run("(select => { select.value = '1'; select.dispatchEvent(new Event('change')) })(document.activeElement)")
    page.wait("document.querySelector('main').innerText.includes('After 1 step') && location.hash.includes('after=1')")
    assert page.run("document.activeElement.value") == "1"
    show(page, address)
    page.wait("document.getElementById('live').innerText === 'live'")
    time.sleep(1)
    page.run("document.querySelector('main dl a').focus()")
    page.run("document.activeElement.dataset.mark = 'old'")
    run.append_samples([{"step": 0, "prompt_index": 0, "reward": 1.0, "prompt": "p", "completion": "c"}])
    page.wait("document.querySelector('main dl a').innerText === '1'", 2 * PROMISED_S)
    assert page.run("document.activeElement.innerText + document.activeElement.dataset.mark") == "1undefined"
    page.open("about:blank")


def test_pages_say_what_they_leave_out(page, run, address):
    size = 2**24 + 10
    for path, line in ((run.metrics_path, "x" * size), (run.samples_path, "x" * size)):
        with open(path, "a") as file:
            file.write(f"{line}\n")
    run.append_metrics(0, {"rollout/rewards_mean": 0.25})
    with open(run.samples_path, "a") as file:
        file.write('{"step": 0, "prompt_index": 0, "completion": "c"}\n')
    for part, files in {"": ("metrics", "samples"), "/curves": ("metrics",), "/samples": ("samples",)}.items():
        show(page, f"{address}{part}")
        for name in files:
            page.wait(f"document.querySelector('main').innerText.includes('{size + 1:,} bytes of {name}.jsonl')")
    page.open("about:blank")
