"""Training uses the tokens sent to the engine and sampled from it, with templates in the formats of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areno.api.agentic import AgentTrajectoryTurn, LossMaskPolicy
from areno.rollouts.conversation.trajectory_rows import branches
from tests.agentic.stage import Script, batch_of, open_trainer, sampling, save_model, split_tokens
from tests.agentic.templates import FORMATS, Format, tokenizer_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("get_weather", "look_up")
]
# Characters that all these tokenizers know, and that start no marker in any format.
PLAIN = st.text(alphabet="abcdefghijklmno pqrstuvwxyz0123456789.?!\n", min_size=1, max_size=24).map(
    lambda text: "x" + " ".join(text.split()) + "y"
)
RICH = st.text(alphabet="abcde fgh.é你🙂\n", min_size=1, max_size=16).map(lambda text: "x" + text + "y")


@dataclass(frozen=True)
class Turn:
    """An answer, and what the client does next."""

    text: str
    thought: str
    calls: list[tuple[str, dict[str, Any]]]
    cut: bool  # the answer ends at the limit
    cuts: list[int]  # where its text is split into separately tokenized pieces
    edit: bool  # the client edits the answer before it continues
    forget: bool  # the client drops fields that it does not use
    reply: str


CALL = st.tuples(
    st.sampled_from(["get_weather", "look_up"]),
    st.fixed_dictionaries({"city": st.text("abc XYZ", min_size=1, max_size=6), "days": st.integers(0, 99)}),
)


def turns(edits: bool) -> st.SearchStrategy[list[Turn]]:
    one = st.builds(
        Turn,
        text=PLAIN | RICH,
        thought=st.just("") | PLAIN,
        calls=st.just([]) | st.lists(CALL, min_size=1, max_size=2),
        cut=st.integers(0, 5).map(lambda n: n == 5),
        cuts=st.lists(st.integers(0, 200), max_size=6),
        edit=st.integers(0, 4).map(lambda n: edits and n == 4),
        forget=st.booleans(),
        reply=PLAIN,
    )
    return st.lists(one, min_size=1, max_size=5)


@dataclass
class Stage:
    form: Format
    trainer: Any
    script: Script
    tokenizer: Any


@pytest.fixture(scope="module", params=sorted(FORMATS))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    form = FORMATS[request.param]
    tokenizer = tokenizer_of(form)
    ends = tokenizer.convert_tokens_to_ids([form.eos, *form.ends.values()])
    folder = save_model(tmp_path_factory.mktemp(request.param) / "model", tokenizer, ends)
    with open_trainer(folder) as trainer:
        yield Stage(form, trainer, Script(trainer.backend), trainer.get_tokenizer())


class Player:
    """Plays a plan through the OpenAI client, and tracks the expected result."""

    def __init__(self, stage: Stage, ctx: Any, item: Any) -> None:
        self.stage, self.form, self.item = stage, stage.form, item
        self.client = openai.OpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": item.prompt}]
        self.returned: list[AgentTrajectoryTurn] = []
        self.breaks = 0  # number of forks of the conversation
        self.thoughts = 0  # number of answers with reasoning since the last question

    def answer(self, turn: Turn, step: str | None) -> dict[str, Any]:
        form, tokenizer = self.form, self.stage.tokenizer
        calls = turn.calls[: form.most_calls] if form.calls is not None else []
        text = form.calls(calls) if form.calls is not None and calls else turn.text
        cuts = [] if form.metaspace else turn.cuts
        thinks = form.opens_thinking or bool(form.thinks and turn.thought)
        tokens = split_tokens(tokenizer, form.thinks.format(turn.thought) if thinks else "", [])
        tokens += split_tokens(tokenizer, text, cuts)
        options: dict[str, Any] = {"max_tokens": len(tokens)} if turn.cut else {}
        if not turn.cut:
            tokens.append(tokenizer.convert_tokens_to_ids(form.end(step)))
        self.stage.script.lines.append(tokens)
        tools = TOOLS if form.calls is not None else openai.NOT_GIVEN
        response = self.client.chat.completions.create(model="policy", messages=self.messages, tools=tools, **options)
        self.returned.append(AgentTrajectoryTurn(item=self.item, messages=list(self.messages), response=response))
        message = response.choices[0].message.model_dump(exclude_none=turn.forget)
        assert (message.get("content") or "").strip() == ("" if calls else turn.text).strip()
        got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
        assert got == calls
        return message

    def play(self, plan: list[Turn]) -> None:
        for place, turn in enumerate(plan):
            calls = bool(turn.calls) and self.form.calls is not None
            step = None if place == len(plan) - 1 else "tool" if calls else "user"
            message = self.answer(turn, step)
            self.thoughts += bool(turn.thought and self.form.thinks)
            if turn.forget:
                message.pop("reasoning_content", None)
            if turn.edit:
                message = {"role": "assistant", "content": "zz" + str(message.get("content"))}
                calls = False
            self.messages.append(message)
            self.messages += self.follow(message, turn.reply) if calls else [{"role": "user", "content": turn.reply}]
            if step is not None:
                dropped = self.thoughts and ("tool" if calls else "user") in self.form.drops_thinking_at
                self.breaks += bool(turn.edit or dropped or self.form.opens_thinking)
                self.thoughts = 0 if not calls else self.thoughts

    def follow(self, message: dict[str, Any], reply: str) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{reply} {number}"}
            for number, call in enumerate(message["tool_calls"])
        ]


def perform(stage: Stage, plan: list[Turn], question: str) -> tuple[Player, Any, list[Any]]:
    stage.script.log.clear()
    stage.script.lines.clear()
    policy = LossMaskPolicy()
    session = stage.trainer.rollout_session(sampling_params=sampling(), loss_mask_policy=policy)
    [item] = batch_of([question]).iter_samples()
    with session as ctx:
        player = Player(stage, ctx, item)
        try:
            player.play(plan)
        finally:
            player.client.close()
        [sample] = ctx.samples(player.returned)
    return player, sample, list(stage.script.log)


def check_rows(sample: Any, log: list[Any]) -> None:
    """Rows consist of what went through the engine, and train each sampled token once."""
    assert [turn.tokens for turn in sample.turns] == [exchange.tokens for exchange in log]
    by_prompt = {(tuple(e.prompt), tuple(e.tokens)): e for e in log}
    trained: list[tuple[int, ...]] = []
    for row, path in zip(sample.rows, branches(sample.turns), strict=True):
        last = by_prompt[tuple(path[-1].prompt), tuple(path[-1].tokens)]
        assert row.tokens == last.prompt + last.tokens
        covered = [False] * len(row.tokens)
        for turn in path:
            sent = by_prompt[tuple(turn.prompt), tuple(turn.tokens)]
            begin, end = len(sent.prompt), len(sent.prompt) + len(sent.tokens)
            assert row.tokens[:begin] == sent.prompt
            assert row.tokens[begin:end] == sent.tokens
            assert row.logprobs[begin:end] == sent.logprobs
            covered[begin:end] = [True] * len(sent.tokens)
            if any(row.trained[begin:end]):
                assert all(row.trained[begin:end])
                trained.append(tuple(sent.prompt + sent.tokens))
        assert row.sampled == covered
        assert all(sampled for sampled, counts in zip(row.sampled, row.trained, strict=True) if counts)
    assert sorted(trained) == sorted(tuple(e.prompt + e.tokens) for e in log)


def examples(number: int) -> settings:
    phases = [Phase.generate]
    return settings(
        max_examples=number, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )


@examples(3)
@given(plan=turns(edits=True), question=PLAIN)
def test_rows_are_what_was_sent_and_sampled(stage: Stage, plan: list[Turn], question: str) -> None:
    check_conversation(stage, plan, question)


@pytest.mark.long
@examples(60)
@given(plan=turns(edits=True), question=PLAIN)
def test_rows_of_many_conversations(stage: Stage, plan: list[Turn], question: str) -> None:
    check_conversation(stage, plan, question)


def check_conversation(stage: Stage, plan: list[Turn], question: str) -> None:
    player, sample, log = perform(stage, plan, question)
    check_rows(sample, log)
    assert len(sample.forks) == player.breaks
    assert len(sample.rows) == 1 + player.breaks
    # Independent of areno's rendering: each prompt is the conversation as rendered by the template.
    for turn, sent in zip(sample.turns, log, strict=True):
        tools = TOOLS if stage.form.calls is not None else None
        messages = [_for_template(message, stage.form) for message in turn.messages]
        wanted = stage.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert stage.tokenizer.decode(sent.prompt).replace(" ", "") == wanted.replace(" ", "")
    rows = [row.tokens for row in sample.rows]
    for row, scored in zip(sample.rows, stage.trainer.score_logprobs("actor", rows), strict=True):
        gaps = [abs(a - b) for a, b, sampled in zip(scored, row.logprobs, row.sampled, strict=True) if sampled]
        assert max(gaps) < 1e-5


def _for_template(message: dict[str, Any], form: Format) -> dict[str, Any]:
    made = {**message, "content": message.get("content") or ""}
    made["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return made
