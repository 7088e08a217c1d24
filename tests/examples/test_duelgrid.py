"""DuelGrid: rules in hand-made duels, the scripted player, rewards, and the page in a real browser."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager

import pytest

from areno.api.agentic.demonstrations import calls, says
from tests.examples import scripted

FOLDER = scripted.FOLDER / "duelgrid"
sys.path.insert(0, str(FOLDER))

from duel_environment import DuelGrid, turn_reward  # noqa: E402
from duelgrid import Duel, Fighter, TurnResult, from_json, scripted_turn  # noqa: E402
from scenarios import SCENARIOS, draw_duel, draw_record  # noqa: E402


def duel(a=(0, 0), u=(5, 5), **fields):
    return Duel({"U": Fighter(*u), "A": Fighter(*a)}, **{"walls": set(), "traps": set(), "pickups": {}, **fields})


def move(*directions):
    return [{"action": "MOVE", "direction": direction} for direction in directions]


def do(*names):
    return [{"action": name} for name in names]


def test_a_turn_moves_at_most_three_tiles():
    game = duel()
    result = game.play_turn(move("right", "down", "down", "down"))
    assert (game.fighters["A"].tile, result.illegal, result.closer, result.unspent) == ((1, 2), True, 3, 0)
    assert "costs 1 energy, and 0 is left" in result.events[-1]
    assert (game.to_move, game.turns_left) == ("U", 23)


@pytest.mark.parametrize(
    ("game", "action"),
    [
        (duel(), move("left")),  # off the grid
        (duel(a=(10, 10)), move("down")),
        (duel(walls={(1, 0)}), move("right")),
        (duel(u=(1, 0)), move("right")),  # taken
        (duel(), do("MOVE")),
        (duel(), do("ATTACK")),  # out of reach
        (duel(u=(1, 1)), do("ATTACK")),  # diagonal
        (duel(u=(5, 0)), do("RANGED_ATTACK")),  # too far
        (duel(u=(3, 1)), do("RANGED_ATTACK")),  # not in line
        (duel(u=(3, 0), walls={(2, 0)}), do("RANGED_ATTACK")),
        (duel(), do("PICKUP")),
        (duel(), do("SHIELD", "SHIELD")),
        (duel(u=(4, 0)), do("RANGED_ATTACK", "RANGED_ATTACK")),  # costs four energy
        (duel(), do("JUMP")),
        (duel(), [{}]),
        (duel(), [{"action": []}]),
        (duel(), [{"action": "MOVE", "direction": []}]),
    ],
)
def test_an_illegal_action_ends_the_turn(game, action):
    result = game.play_turn([*action, *move("down")])
    assert result.illegal
    assert game.fighters["A"].y in (0, 10), "later actions are ignored"


@pytest.mark.parametrize(
    ("game", "action", "health"),
    [
        (duel(u=(1, 0)), do("ATTACK"), 7),
        (duel(u=(0, 1)), do("ATTACK", "ATTACK", "ATTACK"), 1),
        (duel(u=(4, 0)), do("RANGED_ATTACK"), 8),
        (duel(u=(1, 0)), do("RANGED_ATTACK", "ATTACK"), 5),
    ],
)
def test_hits_do_their_damage(game, action, health):
    result = game.play_turn(action)
    assert (game.fighters["U"].health, result.dealt, result.illegal) == (health, 10 - health, False)


def test_a_shield_reduces_every_hit_by_two_until_the_players_next_turn():
    game = duel(u=(1, 0))
    game.play_turn(do("SHIELD"))
    game.play_turn(do("ATTACK", "RANGED_ATTACK"))
    assert game.fighters["A"].health == 9  # 3 - 2, and 2 - 2
    game.play_turn(do("WAIT"))
    game.play_turn(do("ATTACK"))
    assert game.fighters["A"].health == 6


def test_pickups_help_once_and_energy_is_kept():
    game = duel(pickups={(1, 0): "energy", (2, 0): "health"})
    game.fighters["A"].health = 9
    first = game.play_turn([*move("right"), *do("PICKUP"), *move("right"), *do("PICKUP")])
    assert (first.pickups, game.fighters["A"].health, game.pickups) == (2, 10, {})
    assert first.unspent == 3  # 3 + 2 - 2
    assert game.fighters["A"].energy == 0  # only what exceeds a turn's own 3 is kept
    game = duel(pickups={(0, 0): "energy"})
    game.play_turn(do("PICKUP", "WAIT"))
    assert game.fighters["A"].energy == 2
    game.play_turn(do("WAIT"))
    assert not game.play_turn(move("right", "right", "right", "right", "right")).illegal


def test_traps_hurt_and_may_end_the_game():
    game = duel(traps={(1, 0)})
    game.fighters["A"].health = 2
    result = game.play_turn(move("right", "right"))
    assert (result.taken, game.winner, game.fighters["A"].tile) == (2, "U", (1, 0))


def test_after_the_last_turn_the_healthier_player_wins():
    for health, winner in ((10, "draw"), (9, "U")):
        game = duel(turns_left=1)
        game.fighters["A"].health = health
        game.play_turn(do("WAIT"))
        assert game.winner == winner


def test_states_survive_json():
    for scenario in SCENARIOS:
        game = draw_duel(scenario, 3)
        game.play_turn(scripted_turn(game))
        state = json.loads(json.dumps(game.to_json()))
        assert from_json(state).to_json() == game.to_json()
        assert from_json(state) == game


def test_the_scripted_player_obeys_the_rules_and_finishes_games():
    winners = Counter()
    for seed in range(60):
        game, rng = draw_duel(SCENARIOS[seed % 3], seed), random.Random(seed)
        while game.winner is None:
            before = copy.deepcopy(game)
            actions = scripted_turn(game, rng if seed % 2 else None)
            assert game == before, "choosing actions does not change the game"
            assert not game.play_turn(actions).illegal
            assert all(0 <= value <= 10 for fighter in game.fighters.values() for value in fighter.tile)
            assert not {fighter.tile for fighter in game.fighters.values()} & game.walls
        winners[game.winner] += 1
    assert winners["draw"] < 20
    assert len(winners) >= 2


def test_scenarios_differ_in_walls_and_traps():
    assert {name: (len(draw_duel(name, 1).walls), len(draw_duel(name, 1).traps)) for name in SCENARIOS} == {
        "open": (0, 3),
        "wall": (8, 3),
        "traps": (0, 12),
    }


def test_a_turns_reward_is_the_sum_of_its_events():
    mine = TurnResult(dealt=3, taken=2, pickups=1, waits=1, illegal=True, unspent=2, closer=-1)
    theirs = TurnResult(dealt=4)
    expected = 0.10 * 3 - 0.08 * (2 + 4) - 0.01 + 0.10 - 0.02 - 0.30 - 0.05 * 2
    assert turn_reward(mine, theirs) == pytest.approx(expected)
    assert turn_reward(TurnResult(), None) == 0


def reward(row, *answers):
    return scripted.replayed(scripted.reward("duelgrid"), row, answers)


def record(**fields):
    return {"scenario": "open", "seed": 1, "state": duel(**fields).to_json()}


def act(actions):
    return calls(("choose_action", {"actions": actions}))


def test_winning_is_worth_one_and_a_turn_without_a_call_counts_as_illegal():
    near = record(u=(1, 0))
    near["state"]["fighters"]["U"]["health"] = 3
    assert reward(near, act(do("ATTACK"))) == pytest.approx(1.0 + 0.3 - 0.05 * 2)
    far = record(a=(0, 0), u=(10, 10))
    silent, illegal = reward(far, says("hm")), reward(far, act(move("left")))
    assert silent == pytest.approx(-0.3 - 0.15 + 0.01 * 0)
    assert illegal == silent


def test_the_expert_earns_more_than_a_bad_player():
    course = scripted.course("duelgrid")

    def mean(choose):
        rows = [draw_record(random.Random(seed)) for seed in range(150)]
        values = []
        for row in rows:
            task = DuelGrid()
            task.reset(row)
            while task.duel.winner is None:
                task.choose_action(choose(task))
            values.append(task.reward())
        return sum(values) / len(values)

    def expert(task):
        call = course.expert(task)["tool_calls"][0]["function"]
        return json.loads(call["arguments"])["actions"]

    # The opponent plays equally well except in one turn of four; moving first is worth little.
    assert mean(expert) > 0.3
    assert mean(lambda task: move("up")) < -1.5


# -- the page ----------------------------------------------------------------------------------------------------------


@contextmanager
def page(match):
    web_ui = scripted.module(FOLDER / "web_ui.py")
    server = web_ui.make_server(match, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(url, body=None, kind="application/json"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def new_match(**options):
    return scripted.module(FOLDER / "web_ui.py").Match(**options)


def test_a_game_can_be_played_by_requests_and_replayed():
    with page(new_match()) as url:
        status, state = ask(f"{url}/api/new", {"scenario": "traps", "seed": 4})
        assert status == 200
        assert state["frames"][0]["state"] == draw_duel("traps", 4).to_json()
        while not state["frames"][-1]["state"]["winner"]:
            status, state = ask(f"{url}/api/agent", {})
            assert status == 200
            if not state["frames"][-1]["state"]["winner"]:
                status, state = ask(f"{url}/api/action", {"actions": do("WAIT")})
                assert status == 200
        assert state["frames"][-1]["state"]["winner"] == "A"
        assert ask(f"{url}/api/agent", {}) == (400, {"error": "the game is over; start a new game"})
    replayed = new_match(recorded=json.loads(json.dumps(state["match"])))
    assert json.loads(json.dumps(replayed.to_json()["frames"])) == state["frames"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/action", {"actions": []}, "it is A's turn"),
        ("/api/action", {"actions": "x"}, "actions must be a list"),
        ("/api/new", {"scenario": "sea"}, "there is no scenario 'sea'"),
        ("/api/new", {"seed": "x"}, "invalid literal"),
        ("/api/other", {}, "there is no /api/other"),
        ("/api/new", [], "send a JSON object"),
    ],
)
def test_wrong_requests_get_an_error(path, body, message):
    with page(new_match()) as url:
        status, answer = ask(url + path, body)
        assert (status, message in answer["error"]) == (400, True)
        assert ask(f"{url}/api/state")[0] == 200


def test_other_pages_cannot_send_commands():
    with page(new_match()) as url:
        assert ask(f"{url}/api/new", {"seed": 2}, kind="text/plain")[0] == 400
        assert ask(f"{url}/etc/passwd")[0] == 404


def chromium():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    return program


def browse(url, folder, *options):
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=8000", "--window-size=1100,820"]
    return subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_browser_replays_a_recorded_match(tmp_path):
    match = new_match()
    match.start("wall", 7)
    for _ in range(6):
        player = match.to_json()["frames"][-1]["state"]["to_move"]
        match.act(player, None if player == "A" else do("WAIT"))
    frames = match.to_json()["frames"]
    with page(match) as url:
        dom = browse(f"{url}/#frame=3", tmp_path, "--dump-dom")
        browse(f"{url}/#frame=3", tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    grid = re.search(r'<div id="grid".*?>(.*?)</div><\/div>|<div id="grid"[^>]*>(.*?)<aside', dom, re.DOTALL)
    assert grid is not None
    cells = re.findall(r'<div class="([^"]*)">([^<]*)</div>', grid[0])
    assert len(cells) == 121
    for name, fighter in frames[3]["state"]["fighters"].items():
        assert cells[fighter["y"] * 11 + fighter["x"]][1] == name
    assert sum(kind == "wall" for kind, _ in cells) == 8
    assert "3 / 6" in dom
    events = [event for frame in frames[1:4] for event in frame["events"]]
    assert all(event in dom for event in events)
    assert (tmp_path / "page.png").stat().st_size > 20_000  # a blank page has a tenth of it


def test_a_browser_plays_a_turn_with_its_buttons(tmp_path):
    # A script appended to the page acts like a user: it chooses an action and plays it.
    match = new_match()
    match.start("open", 2)
    match.act("A", None)
    source = (FOLDER / "page.html").read_text(encoding="utf-8")
    clicks = "setTimeout(() => { get('moves').children[0].click(); get('play').click(); }, 500);"
    shown = tmp_path / "page.html"
    shown.write_text(source.replace("</script>", f"{clicks}</script>"), encoding="utf-8")
    web_ui = scripted.module(FOLDER / "web_ui.py")
    web_ui._PAGE = shown
    server = web_ui.make_server(match, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        dom = browse(f"http://127.0.0.1:{server.server_address[1]}/", tmp_path, "--dump-dom")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    frames = match.to_json()["frames"]
    assert frames[2]["events"][0].startswith("U ")
    assert len(frames) == 4, "the page also plays A's turn"
    assert "3 / 3" in dom
