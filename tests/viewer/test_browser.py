"""The page in a real browser: its contents, live updates and accessibility."""

from __future__ import annotations

import itertools
import json
import math
import re
import time

import httpx
import pytest

from tests.support.browser import Page
from tests.viewer.stage import HOSTILE, agent_sample, lines_of, run_id, serving, write_run

pytestmark = pytest.mark.long
PROMISED_S = 2.0
PAGES = ["", "/curves", "/samples", "/sample/0", "/evaluations", "/timeline", "/log"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder / "one")
    sample = agent_sample(20)
    run.append_samples([sample, {name: value for name, value in sample.items() if name != "messages"}])
    path = run.path / "session_tracer" / "trainer" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    start = lines_of(run.metrics_path)[0]["time"]
    sessions = [
        {
            "task_id": task, "session_id": task, "status": "accepted",
            "submit_ts": start + task, "finalized_ts": start + task + 2.5,
            "phases": {"generate": [{"start_ts": start + task, "end_ts": start + task + 1}]},
        }
        for task in range(12)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    write_run(folder / "two", config="algo: gspo\nlr: 0.01\nckpt: /models/tiny\n")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="module")
def ids(url):
    with httpx.Client(base_url=url) as session:
        return {name: run_id(session, name) for name in ("one", "two")}


def show(page: Page, address: str) -> None:
    page.open("about:blank")
    page.open(address)
    page.wait(
        "document.querySelector('main h1') && document.title.endsWith('areno view') && document.title !== 'areno view'"
    )


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def test_the_list_shows_the_runs_and_sorts_and_filters_them(page, url, ids):
    show(page, url)
    rows = page.run("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
    assert len(rows) == 2
    row = next(text for text in rows if "grpo" in text)
    assert {20, 0.5469, -2.375} <= set(numbers(row)), "steps, the last reward and the last loss"
    names = "[...document.querySelectorAll('tbody th')].map(cell => cell.innerText)"
    page.run("document.getElementById('sort-name').click()")
    assert page.run(names) == ["one", "two"]
    assert page.run("document.querySelector('[aria-sort]').innerText") == "Run"
    page.run("document.getElementById('sort-name').click()")
    assert page.run(names) == ["two", "one"]
    page.run("document.querySelector('input[type=search]').focus()")
    for key in "gspo":
        page.press(key)
    assert page.run(names) == ["two"]


def test_chosen_runs_link_to_their_curves_and_differences(page, url, ids):
    show(page, url)
    for run in ids.values():
        page.run(f"document.getElementById('choose-{run}').click()")
    assert "Curves of 2 chosen runs" in page.text()
    page.run("[...document.querySelectorAll('main a')].find(link => link.innerText === 'What differs').click()")
    page.wait("document.querySelector('h1').innerText === 'What differs' && document.querySelector('.diff')")
    cells = page.run(
        "[...document.querySelectorAll('.diff tbody tr')].map(row => [...row.children].map(cell => cell.innerText))"
    )
    # Which run is left depends on the order of the list.
    assert {tuple(sorted(row[1:])) for row in cells if row[0] == "lr"} == {("0.001", "0.01")}
    assert {tuple(sorted(row[1:])) for row in cells if row[0] == "algo"} == {("grpo", "gspo")}
    assert "that both runs recorded are bit-equal" in page.text()
    titles = ["First difference", "Settings that may change results", "Other settings", "Environment"]
    assert page.run("[...document.querySelectorAll('h2')].map(title => title.innerText)")[:4] == titles
    page.run("[...document.querySelectorAll('#pages a')].find(link => link.innerText.startsWith('Curves')).click()")
    page.wait("document.querySelectorAll('figure .value').length >= 6")
    page.run("sessionStorage.clear()")


def values_of(page: Page, title: str) -> list[str]:
    script = (
        "[...document.querySelectorAll('figure')].find(figure => figure.querySelector('figcaption').innerText === %s)"
    )
    return page.run(f"[...{script % json.dumps(title)}.querySelectorAll('.value')].map(value => value.title)")


def test_curves_show_the_numbers_of_the_file_and_new_ones_within_two_seconds(page, folder, url, ids):
    run = write_run(folder / "growing", steps=30)
    with httpx.Client(base_url=url) as session:
        while True:  # the folder is searched only every other second
            try:
                growing = run_id(session, "growing")
                break
            except StopIteration:
                time.sleep(0.2)
    show(page, f"{url}/#/curves?run={growing}&run={ids['one']}")
    page.wait("document.querySelectorAll('figure canvas').length >= 4")
    records = lines_of(run.metrics_path)
    last = next(record for record in reversed(records) if "train/loss" in record)
    other = next(record for record in reversed(lines_of(folder / "one" / "metrics.jsonl")) if "train/loss" in record)
    assert values_of(page, "reward") == [str(last["rollout/rewards_mean"]), str(other["rollout/rewards_mean"])]
    assert values_of(page, "loss") == [str(last["train/loss"]), str(other["train/loss"])]
    assert "not finite at step 7" in page.text()
    begin = time.monotonic()
    run.append_metrics(30, {"rollout/rewards_mean": 0.9375, "train/loss": 3.0})
    page.wait("[...document.querySelectorAll('.value')].some(value => value.title === '0.9375')", PROMISED_S)
    assert time.monotonic() - begin < PROMISED_S
    assert values_of(page, "loss")[0] == "3"


def test_the_state_of_the_curves_is_in_the_url(page, url, ids):
    show(page, f"{url}/#/run/{ids['one']}/curves?name=train%2Floss&smooth=0.5&log=1&x=minute")
    page.wait("document.querySelectorAll('figure').length === 1")
    assert page.run("document.querySelector('figcaption').innerText") == "train/loss"
    assert "Values of 0 or less are not shown" in page.text()
    page.run("document.querySelector('details.metrics').open = true")
    labels = "[...document.querySelectorAll('.picker label')]"
    page.run(f"{labels}.find(label => label.innerText === 'time/rollout').querySelector('input').click()")
    page.wait("document.querySelectorAll('figure').length === 2")
    shown = page.run("location.hash")
    assert "name=train%2Floss&name=time%2Frollout&smooth=0.5&log=1&x=minute" in shown
    show(page, f"{url}/{shown}")
    page.wait("document.querySelectorAll('figure canvas').length === 2")


def test_the_values_of_a_chart_can_be_read_in_a_table_and_with_arrow_keys(page, url, ids, folder):
    show(page, f"{url}/#/run/{ids['one']}/curves?name=reward")
    page.wait("document.querySelector('figure canvas')")
    page.run("document.querySelector('figure details').open = true")
    page.wait("document.querySelectorAll('figure tbody tr').length === 20")
    cells = page.run(
        "[...document.querySelectorAll('figure tbody tr')].map(row => [...row.children].map(cell => Number(cell.innerText)))"
    )
    records = [record for record in lines_of(folder / "one" / "metrics.jsonl") if "rollout/rewards_mean" in record]
    assert cells == [[record["step"], pytest.approx(record["rollout/rewards_mean"], rel=1e-3)] for record in records]
    page.run("[...document.querySelectorAll('figure summary')].find(one => one.innerText === 'What it means').click()")
    page.wait("document.querySelector('figure').innerText.includes('rollout/rewards_mean')")
    page.run("document.querySelector('figure').focus()")
    page.press("ArrowLeft")
    assert "step 18: one 0.5313" in page.text("#status")


def test_samples_are_filtered_and_searched(page, url, ids, folder):
    samples = lines_of(folder / "one" / "samples.jsonl")
    show(page, f"{url}/#/run/{ids['one']}/samples?flag=worst&step_from=18&order=oldest")
    page.wait("document.querySelectorAll('.samples li').length")
    names = page.run("[...document.querySelectorAll('.samples strong')].map(name => name.innerText)")
    chosen = [one for one in samples if "worst" in one["picked"] and one["step"] >= 18]
    assert names == [f"{one['step']}/{one['prompt_index']}/{one['sample_index']}" for one in chosen]
    show(page, f"{url}/#/run/{ids['one']}/samples?text=is+12+PLUS")
    page.wait("document.querySelectorAll('.samples li').length === 9")
    assert f"9 samples match; {len(samples)} of {len(samples)} were searched" in page.text()
    show(page, f"{url}/#/run/{ids['one']}/samples")
    page.wait("document.querySelectorAll('.samples li').length === 50")
    for _ in range(3):
        page.run("[...document.querySelectorAll('main button')].find(button => button.innerText === 'More').click()")
        page.wait("!document.querySelector('main button:disabled')")
    assert page.run("document.querySelectorAll('.samples li').length") == len(samples)


def test_the_keyboard_alone_opens_a_sample_and_returns(page, url, ids):
    show(page, f"{url}/#/run/{ids['one']}/samples")
    page.wait("document.querySelectorAll('.samples li').length === 50")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "skip"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "main"
    for key in "jjjk":
        page.press(key)
    second = page.run("document.querySelectorAll('.samples a')[1].id")
    assert page.run("document.activeElement.id") == second
    page.press("Enter")
    page.wait("document.querySelector('h1').innerText.startsWith('Sample ')")
    assert page.run("location.hash").endswith("/sample/" + second.removeprefix("sample-"))
    heading = page.run("document.querySelector('h1').innerText")
    page.press("j")
    page.wait(f"location.hash.endsWith('/sample/{int(second.removeprefix('sample-')) - 1}')")
    page.wait(
        f"!['{heading}', undefined].includes(document.querySelector('h1')?.innerText)"
    )  # the next sample is shown
    page.press("Escape")
    page.wait("document.querySelector('h1').innerText === 'Samples' && document.activeElement.id.startsWith('sample-')")


def test_a_sample_shows_turns_tools_branches_and_tokens(page, url, ids):
    show(page, f"{url}/#/run/{ids['one']}/sample/180")
    page.wait("document.querySelector('.tokens')")
    turns = page.run("[...document.querySelectorAll('.turn')].map(turn => turn.innerText)")
    assert [turn.split("\n")[0] for turn in turns] == ["system", "user", "assistant", "tool · c1", "assistant"]
    assert "calls multiply" in turns[2]
    assert '"a": 6' in turns[2]
    assert "42" in turns[3]
    tree = page.text(".tree")
    sample = agent_sample(20)
    first, second = ([token for part in row for token in part["texts"]] for row in sample["rows"])
    shared = next(place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert f"forks from branch 1 after {shared} tokens (turn 3)" in tree
    assert page.text(".edit ins").replace("\n", "") == "So far: 6 times 7 is 42.<|user|>Continue.<|assistant|>"
    assert page.text(".edit del").startswith('multiply {"a": 6')
    tokens = page.run(
        "[...document.querySelectorAll('.token[data-place]')].map(token => [token.textContent, token.className])"
    )
    assert [text for text, _ in tokens] == second
    assert [text for text, names in tokens if "trained" in names.split()] == ["It", " is", " 42."]
    assert all("a-minus-" in names for _, names in tokens[-3:])
    assert (
        "".join(text for text, names in tokens if "edited" in names.split())
        == "So far: 6 times 7 is 42.<|user|>Continue.<|assistant|>"
    )
    page.run("document.querySelector('.branch').click()")
    page.wait("document.querySelector('h2:nth-of-type(2)').innerText === 'Conversation of branch 1'")
    marked = page.run("[...document.querySelectorAll('.tokens .masked')].map(token => token.textContent)")
    assert marked == ["Now", " I", " add."], "sampled, but not trained on"
    page.run("document.querySelector('.tokens').focus()")
    page.press("End")
    details = page.text(".token-details")
    assert "“ add.”" in details
    assert "sampled, not trained" in details
    assert "log-prob -0.5 (probability 0.6065)" in details
    page.press("ArrowLeft")
    assert "“ I”" in page.text(".token-details")


def test_a_conversation_without_messages_is_built_from_the_roles_of_its_tokens(page, url, ids):
    show(page, f"{url}/#/run/{ids['one']}/sample/181")
    turns = page.run("[...document.querySelectorAll('.turn')].map(turn => turn.innerText.split('\\n'))")
    assert turns == [
        ["system", "You can calculate."],
        ["user", "What is 6 times 7, plus 0?"],
        ["assistant · edited", "So far: 6 times 7 is 42."],
        ["user · edited", "Continue."],
        ["assistant", "It is 42."],
    ]


@pytest.mark.parametrize("color", ["advantage", "logprob", "trained", "version", "role"])
def test_colors_of_tokens_have_a_legend_in_words(page, url, ids, color):
    show(page, f"{url}/#/run/{ids['one']}/sample/180?color={color}")
    legend = page.wait("document.querySelector('ul[aria-label=Colors]')?.innerText")
    words = {
        "advantage": "less likely",
        "logprob": "log-prob below",
        "trained": "trained",
        "version": "version 21",
        "role": "assistant",
    }
    assert words[color] in legend
    assert "underlined: trained" in legend
    backgrounds = page.run(
        "[...document.querySelectorAll('.token[data-place]')].map(token => getComputedStyle(token).backgroundColor)"
    )
    assert len(set(backgrounds)) > 1


def test_other_pages_of_a_run_show_their_files(page, url, ids, folder):
    show(page, f"{url}/#/run/{ids['one']}")
    assert "the reward is flat; try easier prompts" in page.text()
    assert "nested.depth" in page.text()
    show(page, f"{url}/#/run/{ids['one']}/evaluations")
    page.wait("document.querySelectorAll('article').length === 3")
    assert [text for text in ("Before training", "After 20 steps", "A0", "A20") if text not in page.text()] == []
    show(page, f"{url}/#/run/{ids['one']}/timeline")
    page.wait("document.querySelectorAll('rect.session').length === 12")
    page.run("document.querySelector('.timeline ~ details').open = true")
    assert page.run("document.querySelectorAll('.timeline ~ details tbody tr').length") == 12
    page.wait("document.querySelector('figure canvas')")
    assert "Staleness per step" in page.text()


def test_the_log_is_followed(page, url, ids, folder):
    show(page, f"{url}/#/run/{ids['one']}/log")
    page.wait("document.querySelector('.log').innerText.includes('line 2999')")
    with open(folder / "one" / "log.txt", "a") as file:
        file.write("2026-01-01 00:00:01,000 ERROR areno: it broke\n")
    page.wait("document.querySelector('.log .error')?.innerText.includes('it broke')", PROMISED_S)
    page.run(
        "[...document.querySelectorAll('main button')].find(button => button.innerText === 'Earlier lines').click()"
    )
    page.wait("document.querySelector('.log').innerText.includes('line 1500')")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run in which every text is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    name = HOSTILE.replace("/", "_")
    run = write_run(
        folder / name,
        steps=2,
        config=f"algo: {json.dumps(HOSTILE)}\nlr: 1\n{json.dumps(HOSTILE)}: {json.dumps(HOSTILE)}\n",
    )
    run.append_samples([agent_sample(2, HOSTILE)])
    run.append_metrics(2, {HOSTILE: 1.0, f"rollout/reward_parts/{HOSTILE}": 2.0})
    run.append_warning(2, HOSTILE)
    run.append_eval_samples([{"step": 2, "prompt_index": 0, "prompt": HOSTILE, "completion": HOSTILE}])
    run.write_status({"state": HOSTILE, "error": HOSTILE, "started": 1.0})
    run.write_environment({HOSTILE: HOSTILE})
    with open(run.log_path, "a") as file:
        file.write(f"{HOSTILE}\n")
    write_run(folder / "other", steps=1)
    with serving(folder) as url, httpx.Client(base_url=url) as session:
        yield url, run_id(session, name), run_id(session, "other")


def test_hostile_text_stays_text(page, hostile):
    url, run, other = hostile
    addresses = [f"{url}/", f"{url}/#/diff?left={run}&right={other}", f"{url}/#/curves?run={run}&run={other}"]
    addresses += [f"{url}/#/run/{run}{part}" for part in (*PAGES, "/sample/18", "/sample/18?row=0&color=role")]
    for address in addresses:
        show(page, address)
        time.sleep(0.3)
        page.run("document.querySelectorAll('details').forEach(element => (element.open = true))")
        time.sleep(0.1)
        assert page.run("window.hacked === undefined"), address
        assert page.run("document.querySelectorAll('img, main script, [onload], [onerror]').length") == 0, address
        if not address.endswith(("/timeline", "/sample/0")):
            assert "onerror=" in page.run("document.querySelector('main').textContent"), address
    page.wait("document.querySelector('.tokens')")
    assert HOSTILE.split(" ")[1] in page.run("document.querySelector('.tokens').textContent")


def test_a_server_with_a_key_asks_for_it_once(page, folder):
    with serving(folder, "open-sesame") as url:
        page.open(f"{url}/")
        page.wait("document.querySelector('dialog[open] input')")
        for key, text in (("wrong", "This is not the API key"), ("open-sesame", "")):
            page.run(
                f"document.querySelector('dialog input').value = '{key}'; document.querySelector('dialog button').click()"
            )
            if text:
                page.wait(f"document.querySelector('dialog [role=alert]').innerText.includes('{text}')")
        page.wait("document.querySelectorAll('tbody tr').length >= 2")
        assert not page.run("!!document.querySelector('dialog')")
        assert "open-sesame" not in page.run(
            "document.cookie + location.href + JSON.stringify({...sessionStorage, ...localStorage})"
        )
        page.wait("document.getElementById('live').innerText === 'live'")
        page.problems[:] = [text for text in page.problems if "401" not in text]  # the browser logs the 401s
        page.open("about:blank")


NAMED = {
    "button",
    "link",
    "checkbox",
    "textbox",
    "searchbox",
    "combobox",
    "slider",
    "spinbutton",
    "image",
    "figure",
    "table",
    "region",
}


def addresses_of(url, ids):
    run = ids["one"]
    parts = [f"/#/run/{run}{part}" for part in (*PAGES, "/sample/180")]
    return [
        f"{url}{part}"
        for part in ("/", f"/#/curves?run={run}&run={ids['two']}", f"/#/diff?left={run}&right={ids['two']}", *parts)
    ]


def test_every_page_has_landmarks_one_title_and_named_controls(page, url, ids):
    for address in addresses_of(url, ids):
        show(page, address)
        page.run("document.querySelectorAll('details').forEach(element => (element.open = true))")
        time.sleep(0.3)
        nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        roles = [node["role"]["value"] for node in nodes]
        assert {"banner", "navigation", "main", "status"} <= set(roles), address
        assert page.run("document.querySelectorAll('h1').length") == 1, address
        assert page.run("document.documentElement.lang") == "en"
        unnamed = [node for node in nodes if node["role"]["value"] in NAMED and not node.get("name", {}).get("value")]
        assert unnamed == [], address
        levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map(title => Number(title.tagName[1]))")
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), address


def test_nothing_is_wider_than_a_small_phone(page, url, ids):
    page.size(360, 740)
    for address in addresses_of(url, ids):
        show(page, address)
        time.sleep(0.3)
        assert page.run("document.documentElement.scrollWidth") <= 360, address
        assert page.run("document.documentElement.clientWidth") == 360


def luminance(color: str) -> float:
    channels = [float(value) / 255 for value in re.findall(r"[\d.]+", color)[:3]]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast_in_light_and_dark_mode(page, url, ids, dark):
    page.dark(dark)
    show(page, f"{url}/#/run/{ids['one']}")
    back = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
    assert back < 0.05 if dark else back > 0.9
    for name in (
        "--text",
        "--muted",
        "--accent",
        "--good",
        "--bad",
        "--warn",
        *(f"--run-{place}" for place in range(8)),
    ):
        script = f"(e => {{ e.style.color = 'var({name})'; return getComputedStyle(e).color }})(document.body)"
        high, low = sorted((luminance(page.run(script)), back), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= (3 if "run" in name else 4.5), name


def test_focus_is_visible(page, url):
    show(page, url)
    page.press("Tab")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_unusual_series_are_drawn(page, tmp_path, steps):
    run = write_run(tmp_path / "run", steps=0)
    values = {"zero": 0.0, "same": -5.0, "huge": 1e300, "tiny": 1e-300, "none": math.nan, "mixed": 1.0, "growing": 1.0}
    for step in range(steps):
        more = {"mixed": (-1) ** step * 10.0 ** (step % 30 * 10), "growing": 10.0**step}
        run.append_metrics(step * 1000, values | more)
    with serving(tmp_path) as url, httpx.Client(base_url=url) as session:
        address = f"{url}/#/run/{run_id(session, 'run')}/curves?" + "&".join(f"name={name}" for name in values)
        for options in ("", "&log=1&smooth=0.9", "&x=minute"):
            show(page, address + options)
            page.wait("document.querySelectorAll('figure canvas').length === 7")
            assert "log" in options or values_of(page, "same") == ["-5"]
            assert float(values_of(page, "huge")[0]) == 1e300
            page.run("document.querySelectorAll('details').forEach(element => (element.open = true))")
        page.open("about:blank")
