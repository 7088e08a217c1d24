"""Environments: conversations with a model, replay, and error handling."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno import SamplingParams
from areno.api.agentic import AgentBatch, LossMaskPolicy
from areno.api.agentic.collect import AgentRunner
from areno.api.agentic.demonstrations import calls, demonstrate, demonstration_rows, says
from areno.api.agentic.environment import (
    Answer,
    Environment,
    converse,
    environment_reward,
    environment_rows,
    generate_records,
    replay,
    run_environment,
)
from areno.api.agentic.tools import ToolError
from areno.errors import UsageError
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from areno.text.chat import load_tokenizer
from areno.types import RewardRecord
from tests.agentic.stage import open_trainer
from tests.examples import scripted
from tests.support.examples import examples

ENDS = Counter()


class Countdown(Environment):
    """Counts down from the record's ``start`` to 0 in steps of 1 to 3; a text answer gets the number left."""

    def reset(self, record):
        self.left, self.answers, self.taken = record["start"], [], []
        return f"Count down from {self.left}."

    def tools(self):
        return [self.take]

    async def take(self, count: int) -> str:
        """Take away."""
        await asyncio.sleep(0)
        if not 1 <= count <= 3:
            raise ToolError("1 to 3")
        self.left -= count
        self.taken.append(count)
        return str(self.left)

    def step(self, answer: Answer):
        self.answers.append(answer)
        if answer.text == "crash":
            raise RuntimeError("crashed")
        if answer.text == "stop" or self.left <= 0:
            return None
        return "" if answer.results else f"{self.left} left"

    def reward(self):
        return float(self.left == 0) - 0.1 * sum(result.failed for answer in self.answers for result in answer.results)

    def close(self):
        ENDS[id(self)] += 1


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = scripted.untrained(tmp_path_factory.mktemp("model"), scripted.course("calculator"))
    with open_trainer(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(trainer):
    return trainer.get_tokenizer()


def take(*counts):
    return calls(*(("take", {"count": count}) for count in counts))


def perform(trainer, start, *answers, **options):
    """The sample of a conversation in which the model gives these answers."""
    row = {"start": start}
    tools = Countdown().reset(row) and []
    lines = scripted.lines_of(trainer, [{"role": "user", "content": "x"}, *answers], tools)
    return scripted.perform(trainer, run_environment(Countdown, **options), row, lines)


def test_a_conversation_of_calls_and_text_becomes_one_row_in_order(trainer):
    sample = perform(trainer, 7, take(2), says("and now?"), take(1, 3), take(1))
    shown = [(message["role"], message.get("content") or "") for message in sample.record.messages]
    assert shown == [
        ("user", "Count down from 7."),
        ("assistant", ""),
        ("tool", "5"),
        ("assistant", "and now?"),
        ("user", "5 left"),
        ("assistant", ""),
        ("tool", "4"),
        ("tool", "1"),
        ("assistant", ""),
        ("tool", "0"),
    ]
    ids = [call["id"] for message in sample.record.messages for call in message.get("tool_calls") or []]
    answered = [message["tool_call_id"] for message in sample.record.messages if message["role"] == "tool"]
    assert answered == ids
    assert len(set(ids)) == 4
    assert len(sample.rows) == 1
    assert scripted.rewarded(environment_reward(Countdown), sample.record) == 1.0


def test_errors_of_a_call_are_reported_to_the_model(trainer):
    sample = perform(trainer, 3, take(9), take("two"), take(3))
    results = [message["content"] for message in sample.record.messages if message["role"] == "tool"]
    assert results == ["error: 1 to 3", 'error: count must be of type integer, not "two"', "0"]
    assert scripted.rewarded(environment_reward(Countdown), sample.record) == pytest.approx(0.8)


def test_a_conversation_ends_at_the_turn_limit(trainer):
    sample = perform(trainer, 50, *[take(1)] * 3, max_turns=3)
    assert len(sample.turns) == 3
    assert [message["role"] for message in sample.record.messages][-1] == "tool"


def test_a_required_tool_is_called(trainer):
    # The model is untrained and could generate anything; the grammar allows only calls.
    agent = run_environment(Countdown, max_turns=2, tool_choice="take", request={"temperature": 0.5})
    sample = scripted.perform(trainer, agent, {"start": 50}, [])
    assert all(len(message["tool_calls"]) >= 1 for message in sample.record.messages if message["role"] == "assistant")


def test_a_conversation_ends_when_it_exceeds_the_context(trainer):
    runner = AgentRunner(
        run_environment(Countdown, max_turns=50), LossMaskPolicy(), trainer.get_tokenizer(), timeout_s=120, retries=0
    )
    sampling = SamplingParams(max_new_tokens=20, max_context_len=200, ignore_eos=True)
    with trainer.rollout_session(sampling_params=sampling, max_running_prompts=2, proxy=True) as ctx:
        collected = runner.collect(ctx.proxy, AgentBatch([{"start": 900}], [""], [[1]], 2))
    assert not collected.errors
    for sample in collected.samples:
        assert 1 < len(sample.turns) < 20
        assert sample.context_full, "the trainer filters samples by this flag"
        assert sample.turns[-2].length <= 200 <= sample.longest


def test_a_failing_sample_does_not_affect_others_and_every_environment_is_closed(trainer):
    class Failing(Countdown):
        def reset(self, record):
            super().reset(record)
            return record["prompt"]

        def step(self, answer):
            if self.left == 13:
                raise RuntimeError("crashed")
            return None

    ENDS.clear()
    rows = [{"start": start, "prompt": f"Count down from {start}."} for start in (3, 13, 4)]
    runner = AgentRunner(run_environment(Failing), LossMaskPolicy(), trainer.get_tokenizer(), timeout_s=120, retries=1)
    with trainer.rollout_session(
        sampling_params=SamplingParams(max_new_tokens=4), max_running_prompts=4, proxy=True
    ) as ctx:
        collected = runner.collect(ctx.proxy, AgentBatch(rows, [""] * 3, [[1]] * 3, 2))
    assert [(s.item.prompt_index, s.item.sample_index) for s in collected.samples] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert set(collected.errors) == {(1, 0), (1, 1)}
    assert all("crashed" in error for error in collected.errors.values())
    assert collected.rerun == 2  # each failed sample on its own
    assert sorted(ENDS.values()) == [1] * 8  # six samples and two retries


def ask_server(trainer, start, max_turns=8, **sampling):
    """Converse with the server of ``areno serve``, as an evaluation does."""

    async def play():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            return await converse(Countdown(), {"start": start}, client, max_turns=max_turns, request=sampling)

    with ServerThread(Service(ServingConfig(model_name="policy"), trainer.backend)) as server:
        return asyncio.run(play())


def test_any_openai_compatible_server_works(trainer):
    played = ask_server(trainer, 50, max_turns=2, max_tokens=6, temperature=0)
    assert played.ending == "turn limit"
    assert [sent for sent, _ in played.turns] == [1, 3]
    assert [message["role"] for message in played.messages] == ["user", "assistant", "user"] * 1 + ["assistant", "user"]


def test_a_conversation_too_long_for_the_server_ends(tmp_path):
    folder = scripted.untrained(tmp_path, scripted.course("calculator"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 512}))
    with open_trainer(folder) as trainer:
        context = trainer.backend.actor.model.context_length
        assert context == 512
        played = ask_server(trainer, 50, max_tokens=context // 2, extra_body={"ignore_eos": True})
    assert played.ending == "too long"
    assert 1 <= len(played.turns) <= 3


def test_thinking_is_not_part_of_an_answers_text():
    game = Countdown()
    text = "<think>stop?\nno</think> go <think>never ends"
    asyncio.run(replay(game, {"start": 5}, [says(text), says("stop")]))
    assert [answer.text for answer in game.answers] == ["go", "stop"]


def test_an_environment_must_not_reply_to_text_with_an_empty_string():
    class Silent(Countdown):
        def step(self, answer):
            return ""

    with pytest.raises(UsageError, match=r"Silent\.step returned an empty string"):
        asyncio.run(replay(Silent(), {"start": 5}, [says("hm")]))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 12), st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=8))
def test_a_replay_ends_in_the_same_state_as_the_game(start, moves):
    answers = iter([take(*counts) if counts else says("next") for counts in moves] + [says("stop")])
    game, again = Countdown(), Countdown()
    messages, _ = asyncio.run(demonstrate(game, {"start": start}, lambda _: next(answers), max_turns=99))
    asyncio.run(replay(again, {"start": start}, messages))
    assert (again.left, again.taken, again.reward()) == (game.left, game.taken, game.reward())
    assert [message for message in messages if message["role"] == "tool"] == [
        result.message() for answer in again.answers for result in answer.results
    ]


def test_opening_answers_of_an_environment_are_not_replayed():
    class WithExample(Countdown):
        def reset(self, record):
            opening = super().reset(record)
            return [{"role": "user", "content": "From 1."}, take(1), {"role": "user", "content": opening}]

    game = WithExample()
    messages, _ = asyncio.run(demonstrate(game, {"start": 2}, lambda _: take(2)))
    assert (game.taken, len([m for m in messages if m["role"] == "assistant"])) == ([2], 2)
    record = RewardRecord(messages=messages, source_record={"start": 2})
    assert asyncio.run(environment_reward(WithExample)(record)) == 1.0


def test_an_answer_that_was_cut_off_while_thinking_is_not_replayed():
    class Silent(Countdown):
        def step(self, answer):
            assert answer.text or answer.results
            return super().step(answer)

    messages = [{"role": "user", "content": "x"}, take(2), {"role": "assistant", "content": "", "reasoning": "so"}]
    for start, reward in ((2, 1.0), (5, 0.0)):
        record = RewardRecord(messages=messages, source_record={"start": start}, metadata={"finish_reason": "length"})
        assert asyncio.run(environment_reward(Silent)(record)) == reward


def test_demonstrations_equal_the_conversation_rendered_by_the_template(tokenizer):
    answers = iter([take(2), says("and now?"), take(1, 2)])
    messages, tools = asyncio.run(demonstrate(Countdown(), {"start": 5}, lambda _: next(answers)))
    rows = demonstration_rows(tokenizer, messages, tools)
    # Templates serialize arguments to JSON; strings would be quoted again.
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert len(rows) == 3
    for row in rows:
        assert whole.startswith(row["prompt"] + row["response"] + tokenizer.eos_token)
    assert rows[1]["response"] == "and now?"
    assert [row["response"].count("<tool_call>") for row in rows] == [1, 0, 2]


def test_demonstrations_end_with_the_end_of_turn_if_it_is_not_the_eos_token(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    other = load_tokenizer(str(tmp_path))
    other.eos_token = "<eos>"
    conversation = [{"role": "user", "content": "a"}, says("b"), {"role": "user", "content": "c"}, says("d")]
    rows = demonstration_rows(other, conversation, [])
    end = tokenizer.eos_token  # with which the template ends a turn
    assert [row["response"] for row in rows] == [f"b{end}", f"d{end}"]


def test_demonstrations_refuse_a_template_that_rewrites_the_conversation(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    forgetful = load_tokenizer(str(tmp_path))
    forgetful.chat_template = "{{ messages | length }}{{ messages[-1].content }}{{ '>' if add_generation_prompt }}"
    with pytest.raises(UsageError, match="adding message 1 makes the chat template rewrite the earlier"):
        demonstration_rows(forgetful, [{"role": "user", "content": "a"}, says("b")], [])


def draw(rng: random.Random, *, hard: bool = False):
    return {"start": rng.randrange(100, 999) if hard else rng.randrange(10)}


def test_generated_files_depend_only_on_the_seed_and_longer_ones_extend_shorter_ones(tmp_path, capsys):
    def rows(*options):
        generate_records(draw, {"hard": "larger numbers"}, ["--output", str(tmp_path / "deep" / "rows"), *options])
        return [json.loads(line) for line in (tmp_path / "deep" / "rows").read_text().splitlines()]

    assert len(rows()) == 128
    assert rows("--count", "5", "--seed", "1") == rows("--count", "9", "--seed", "1")[:5]
    assert rows("--count", "30", "--seed", "1") != rows("--count", "30", "--seed", "2")
    assert all(row["start"] >= 100 for row in rows("--hard"))
    assert "wrote 128 records to" in capsys.readouterr().out


def test_rows_without_the_environments_key_are_refused_with_their_keys():
    assert environment_rows(Countdown, [{"start": 3, "more": 1}], "start") == [
        {"start": 3, "more": 1, "prompt": "Count down from 3."}
    ]
    with pytest.raises(KeyError, match="a row lacks `start` and has only end, more"):
        environment_rows(Countdown, [{"more": 1, "end": 2}], "start")


def test_the_documented_environment_works():
    text = (scripted.FOLDER.parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    program: dict = {"__name__": "doors"}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], program)

    def worth(*doors):
        messages = [calls(("open_door", {"door": door})) for door in doors]
        record = RewardRecord(messages=messages, source_record={"prize": "middle"})
        return asyncio.run(program["reward_fn"](record))

    assert [worth(), worth("middle"), worth("left", "middle"), worth("left", "right", "middle"), worth("up")] == [
        *(0.0, 1.0, 0.5, 0.0, 0.0)
    ]
