"""DuelGrid in the browser: play against a served model, or replay a recorded match.

    areno serve --model-path MODEL --served-model-name policy
    python examples/agentic/duelgrid/web_ui.py --base-url http://127.0.0.1:8000/v1 --api-key EMPTY --model policy
    python examples/agentic/duelgrid/web_ui.py --replay match.json

The page is a single file without external resources. The rules are the same as in training.
``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL`` are the defaults of the options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from duel_environment import RULES, text_of
from duelgrid import Action, Duel, from_json, scripted_turn
from scenarios import SCENARIOS, draw_duel

from areno.api.agentic.tools import Toolset

_PAGE = Path(__file__).with_name("page.html")
_MAX_BODY = 1 << 20


class RequestError(Exception):
    """A request from the browser cannot be fulfilled. The page shows the message to the user."""


class Model:
    """A model behind an OpenAI-compatible endpoint that plays as ``A``.

    Args:
        base_url: address of the server, up to ``/v1``.
        api_key: key of the server.
        name: name of the model on the server.
        debug: print every answer.
    """

    def __init__(self, base_url: str, api_key: str, name: str, debug: bool = False) -> None:
        import openai

        self._client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
        self._errors = openai.OpenAIError
        self._name, self._debug = name, debug
        self._actions: list[Action] = []
        self._tools = Toolset([self.choose_action])

    def choose_action(self, actions: list[Action]) -> str:
        """Play your turn."""
        self._actions = actions
        return "done"

    def turn(self, duel: Duel) -> list[Any]:
        """Return the actions of the model's turn, or one illegal action if the model called no tool.

        Raises:
            RequestError: the server cannot be reached or refuses the request.
        """
        try:
            response = self._client.chat.completions.create(
                model=self._name,
                messages=[{"role": "user", "content": f"{RULES}\n{text_of(duel)}"}],
                tools=self._tools.schemas,  # type: ignore[arg-type]
                max_tokens=256,
            )
        except self._errors as error:
            raise RequestError(f"the model cannot be queried: {error}") from error
        message = response.choices[0].message
        if self._debug:
            print(message.model_dump_json(exclude_none=True), flush=True)
        for call in message.tool_calls or []:
            result = asyncio.run(self._tools.call(call.function.name, call.function.arguments))  # type: ignore[union-attr]
            if not result.failed:
                return list(self._actions)
        return [{"action": "none"}]


class Match:
    """A game that is played in the browser, with its history.

    Args:
        model: model that plays as ``A``; None: the script plays ``A``.
        recorded: recorded match to show first.
    """

    def __init__(self, model: Model | None = None, recorded: Mapping[str, Any] | None = None) -> None:
        self._model, self._lock = model, threading.Lock()
        self.start("open", 1)
        if recorded is not None:
            self._begin(from_json(recorded["start"]))
            for actions in recorded["turns"]:
                self._play(actions)

    def start(self, scenario: str, seed: int) -> None:
        """Start a new game.

        Raises:
            RequestError: no scenario has this name.
        """
        if scenario not in SCENARIOS:
            raise RequestError(f"there is no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
        self._begin(draw_duel(scenario, seed))

    def _begin(self, duel: Duel) -> None:
        self._duel = duel
        self._recorded: dict[str, Any] = {"start": duel.to_json(), "turns": []}
        self._frames = [{"state": duel.to_json(), "events": []}]

    def to_json(self) -> dict[str, Any]:
        """Return all frames for the page, and the match in the format of ``--replay``."""
        player = "script" if self._model is None else "model"
        return {"frames": self._frames, "match": self._recorded, "agent": player, "scenarios": SCENARIOS}

    def act(self, player: str, actions: Sequence[Mapping[str, Any]] | None) -> None:
        """Play a turn.

        Args:
            player: ``U`` or ``A``.
            actions: the player's actions; None: the model or the script chooses.

        Raises:
            RequestError: it is not this player's turn, or the game is over.
        """
        if self._duel.winner:
            raise RequestError("the game is over; start a new game")
        if self._duel.to_move != player:
            raise RequestError(f"it is {self._duel.to_move}'s turn")
        if actions is None:
            actions = self._model.turn(self._duel) if self._model else scripted_turn(self._duel)
        self._play(actions)

    def _play(self, actions: Sequence[Mapping[str, Any]]) -> None:
        result = self._duel.play_turn(actions)
        self._recorded["turns"].append(list(actions))
        self._frames.append({"state": self._duel.to_json(), "events": result.events})

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request; return the resulting state.

        Raises:
            RequestError: the request cannot be fulfilled.
        """
        with self._lock:
            if path == "/api/new":
                self.start(str(body.get("scenario", "open")), int(body.get("seed", 1)))
            elif path == "/api/action":
                self.act("U", _checked(body.get("actions")))
            elif path == "/api/agent":
                self.act("A", None)
            else:
                raise RequestError(f"there is no {path}")
            return self.to_json()


def _checked(actions: Any) -> list[Mapping[str, Any]]:
    if not isinstance(actions, list) or not all(isinstance(action, dict) for action in actions):
        raise RequestError("actions must be a list of objects")
    return actions


def make_server(match: Match, port: int) -> ThreadingHTTPServer:
    """Return the server on a loopback port; 0 selects a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page or the state."""
            if self.path == "/":
                self._send(200, _PAGE.read_bytes(), "text/html; charset=utf-8")
            elif self.path == "/api/state":
                self._send_json(200, match.to_json())
            else:
                self._send_json(404, {"error": "not found"})

        def do_POST(self) -> None:
            """Execute a command. It must be JSON, so that other pages cannot send commands without a preflight request."""
            length = int(self.headers.get("Content-Length") or 0)
            # Read the body before refusing: closing a socket with unread bytes resets the connection, and the answer is lost.
            content = self.rfile.read(min(length, _MAX_BODY))
            if length > _MAX_BODY or self.headers.get_content_type() != "application/json":
                self._send_json(400, {"error": "send a small JSON object"})
                return
            try:
                body = json.loads(content or b"{}")
            except ValueError:
                body = None
            if isinstance(body, dict):
                self._answer(body)
            else:
                self._send_json(400, {"error": "send a JSON object"})

        def _answer(self, body: Mapping[str, Any]) -> None:
            try:
                self._send_json(200, match.answer(self.path, body))
            except (RequestError, ValueError, TypeError) as error:
                self._send_json(400, {"error": str(error)})

        def _send_json(self, status: int, value: Mapping[str, Any]) -> None:
            self._send(status, json.dumps(value).encode(), "application/json")

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Do not log requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL"), help="endpoint of the model, up to /v1"
    )
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "EMPTY"), help="key of the endpoint")
    parser.add_argument(
        "--model", default=os.environ.get("OPENAI_MODEL", "policy"), help="name of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8765, help="port of the page (default: %(default)s; 0 selects a free port)"
    )
    parser.add_argument("--replay", type=Path, help="replay a match that the page has saved")
    parser.add_argument("--debug-llm", action="store_true", help="print every answer of the model")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code."""
    given = parse(argv)
    model = Model(given.base_url, given.api_key, given.model, given.debug_llm) if given.base_url else None
    recorded = json.loads(given.replay.read_text(encoding="utf-8")) if given.replay else None
    server = make_server(Match(model, recorded), given.port)
    playing = (
        f"the model {given.model} at {given.base_url}"
        if model
        else "the script (set --base-url to play against a model)"
    )
    print(f"DuelGrid at http://127.0.0.1:{server.server_address[1]} against {playing}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
