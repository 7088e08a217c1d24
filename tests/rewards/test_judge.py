"""A judge at a URL. The server is a stub that returns what each test sets: grades of a real model would prove nothing."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areno.errors import RewardError
from areno.rewards.judge import Judge
from areno.types import RewardRecord
from tests.support.stubs import JsonAnswers


class StubServer(ThreadingHTTPServer):
    """Keeps the requests, and answers each with the next of ``replies``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests, self.replies = [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answers(JsonAnswers, BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"data": [{"id": "judge-7b"}]})

    def do_POST(self) -> None:
        body = self.body()
        self.server.requests.append((self.headers.get("Authorization"), body))
        self.answer({"choices": [{"message": {"content": self.server.replies.pop(0)}}]})


@pytest.fixture
def stub():
    made = StubServer()
    yield made
    made.shutdown()


QUESTION = 'Grade from 0 to 10, as {"grade": N}.\nQ: {prompt}\nA: {completion}\nright: {answer} {level}'


def test_a_record_and_the_arguments_of_an_experiment_give_the_same_request(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    judge = Judge(stub.url, QUESTION, max_tokens=5)
    stub.replies += ["The answer 3 is right. Grade: 8", "7.5"]
    completion = "{answer} {prompt} is 3"
    record = RewardRecord(prompt="1+2?", completion=completion, answer="3", source_record={"level": "easy"}, tokens=[1])
    assert judge(record) == 0.8
    assert judge("1+2?", completion, [1], [2], answer="3", level="easy") == 0.75
    (key, first), (_, second) = stub.requests
    assert key == "Bearer secret"
    assert first == second
    assert first["model"] == "judge-7b"
    assert (first["temperature"], first["max_tokens"]) == (0, 5)
    text = 'Grade from 0 to 10, as {"grade": N}.\nQ: 1+2?\nA: {answer} {prompt} is 3\nright: 3 easy'
    assert first["messages"] == [{"role": "user", "content": text}]  # placeholders in the completion stay as they are


def test_grades_out_of_bounds_are_clamped_and_words_are_an_error(stub):
    judge = Judge(stub.url, "{completion}", most=5, model="other")
    stub.replies += ["12", "-3", "excellent"]
    assert [judge("p", "c"), judge("p", "c")] == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"returned no number: 'excellent'"):
        judge("p", "c")
    assert {body["model"] for _, body in stub.requests} == {"other"}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("8/10", 0.8),
        ("Grade: 8 / 10.", 0.8),
        ("7.5 out of 10", 0.75),
        ("Both 1/2 parts; 6", 0.6),
        ("10", 1.0),
        ("8 (on a scale of 0-10)", 0.8),
        ("Score: 8, range 1-10", 0.8),
        ("On a scale from 1 to 10, this is a 6.", 0.6),
        ("I would rate this 7-8", 0.8),
    ],
)
def test_a_maximum_after_the_grade_is_not_the_grade(stub, reply, reward):
    stub.replies.append(reply)
    assert Judge(stub.url, "{completion}")("p", "c") == reward


@pytest.mark.parametrize("reply", ["**8**/10", "8 (out of 10)"])
def test_markup_around_the_grade_is_ignored(stub, reply):
    stub.replies.append(reply)
    assert Judge(stub.url, "{completion}")("p", "c") == 0.8


def test_an_unreachable_judge_is_a_reward_error():
    with pytest.raises(RewardError, match=r"the request to the judge at http://127\.0\.0\.1:9/v1 failed: ConnectError"):
        Judge("http://127.0.0.1:9/v1", "{completion}")("p", "c")
