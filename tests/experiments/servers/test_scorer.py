"""The limits of a teacher on a server, which scores at temperature 1; scores of a real server are in ``test_vllm.py``."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areno.errors import UsageError
from areno.rollouts.servers.scorer import ServerScorer
from tests.support.stubs import JsonAnswers


class OneModel(JsonAnswers, BaseHTTPRequestHandler):
    """A stub that lists a model and gives each token the log-prob -0.5, as far as it is asked."""

    def do_GET(self):
        self.answer({"data": [{"id": "teacher"}]})

    def do_POST(self):
        tokens = self.body()["prompt"]
        self.answer({"choices": [{"logprobs": {"token_logprobs": [None] + [-0.5] * len(tokens)}}]})


def test_rows_of_another_temperature_are_refused_and_not_scored_at_temperature_1():
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        scorer = ServerScorer(f"http://127.0.0.1:{server.server_port}/v1", "teacher.path", 5.0)
        assert scorer([[5, 6, 7], [8]], [1.0, 1.0]) == [[0.0, -0.5, -0.5], [0.0]]
        with pytest.raises(UsageError, match=r"teacher\.path=http://.*only at temperature 1, but .* temperature 0\.7"):
            scorer([[5, 6, 7], [8]], [1.0, 0.7])
    finally:
        server.shutdown()
        server.server_close()
