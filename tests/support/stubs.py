"""Stubs for what real parts cannot do: servers with chosen answers, and a grammar that fails."""

from __future__ import annotations

import json


class JsonAnswers:
    """For a :class:`http.server.BaseHTTPRequestHandler` that receives and sends JSON; logs nothing."""

    def body(self):
        """The JSON of the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, value, status=200):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class BrokenGrammar:
    """Fails at its third token; a stub, because no schema is known that makes the real grammars fail."""

    finished = False

    def __init__(self, _tokenizer):
        self.pushed = 0

    def allowed(self):
        return None

    def forces(self, token):
        return False

    def push(self, token):
        self.pushed += 1
        if self.pushed == 3:
            raise ValueError("out of fuel")
