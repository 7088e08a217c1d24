"""A rollout session with a proxy: the documented program, keys per sample, several conversations per sample."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import openai
import pytest

import areno
from areno.api.agentic import AgentBatch, AgentTrajectory, AgentTrajectoryTurn
from areno.rollouts.conversation.recorder import ConversationRecorder
from tests.agentic.stage import batch_of, sampling

SPEC = Path(os.environ.get("ARENO_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")).parent / "spec"


def ask(ctx, messages, key=None, url=None, **options):
    with openai.OpenAI(base_url=url or ctx.base_url, api_key=key or ctx.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(**{"model": "policy", "messages": messages, "max_tokens": 4, **options})
        return list(answer) if options.get("stream") else answer


def user(text):
    return {"role": "user", "content": text}


def test_the_documented_sdk_program_runs_as_printed(trainer):
    page = SPEC / "trainer-sdk.md"
    if not page.is_file():
        pytest.skip(f"the page is missing ({page})")
    text = page.read_text(encoding="utf-8")
    begin = text.index("import asyncio", text.index("Agentic rollout with tools"))
    # All of it except the construction of the trainer, which names a model that is not available.
    program = text[begin : text.index("\ntrainer = Trainer(", begin)]
    prompts = [{"prompt": f"Go {way}."} for way in ("up", "down")]
    [batch] = trainer.load_prompt_batches(prompts, batch_size=2, max_prompt_tokens=100)
    # A random model needs more than the page's 16 tokens to complete a call; the grammar ensures that it ends.
    for limit in (16, 400):
        names: dict = {}
        exec(compile(program.replace("max_tokens=16", f"max_tokens={limit}"), str(page), "exec"), names)
        trajectories = asyncio.run(names["collect_agentic_trajectories"](trainer, batch))
        assert [type(one) for one in trajectories] == [AgentTrajectory] * 8
        turns = [one.turns[0] for one in trajectories]
        assert [(t.item.prompt_index, t.item.sample_index) for t in turns] == [
            (p, s) for p in range(2) for s in range(4)
        ]
        assert all(0 < len(turn.response_tokens) == len(turn.response_logprobs) <= limit for turn in turns)
    assert {call.function.name for turn in turns for call in turn.parsed_tool_calls} == {"choose_move"}
    rewards = [names["reward_fn"](areno.RewardRecord(tool_calls=turn.parsed_tool_calls)) for turn in turns]
    assert rewards == [1.0 if turn.parsed_tool_calls else -1.0 for turn in turns]


def test_without_a_proxy_there_is_no_base_url(trainer):
    with (
        trainer.rollout_session(sampling_params=sampling(), proxy=False) as ctx,
        pytest.raises(RuntimeError, match="this rollout session has no server"),
    ):
        ctx.get_base_url()
    with pytest.raises(RuntimeError, match="has not been entered"):
        trainer.rollout_session(sampling_params=sampling()).get_base_url()


def test_a_key_of_another_session_is_refused(trainer):
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        with pytest.raises(openai.AuthenticationError):
            ask(ctx, [user("x")], key="areno-agentic")
        assert httpx.get(f"{ctx.base_url}/models").status_code == 401
        assert httpx.get(ctx.get_base_url().removesuffix("/v1") + "/health").status_code == 200
        url = ctx.get_base_url()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_samples_with_their_own_key_or_url_are_recorded_separately(trainer):
    items = list(batch_of(["What is 1 plus 2?"], 3).iter_samples())
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        for number, item in enumerate(items[:2]):
            for _ in range(number + 1):
                ask(ctx, [user(item.prompt)], key=ctx.get_api_key(item))
        chunks = ask(ctx, [user("streamed")], key="any", url=ctx.get_base_url(items[2]), stream=True)
        trajectories = [ctx.trajectory(item) for item in items]
    assert [len(one.turns) for one in trajectories] == [1, 2, 1]
    last = chunks[-1].model_extra["areno"]
    assert trajectories[2].turns[0].response_tokens == last["response_tokens"]
    assert trajectories[2].turns[0].messages == [user("streamed")]
    samples = ctx.samples(trajectories)
    assert [len(sample.rows) for sample in samples] == [1, 2, 1]


def test_session_defaults_apply_unless_a_request_overrides_them(trainer):
    params = sampling(max_new_tokens=3, temperature=0.5, ignore_eos=True)
    [item] = batch_of(["x"]).iter_samples()
    with trainer.rollout_session(sampling_params=params) as ctx:
        plain = ask(ctx, [user("x")], max_tokens=openai.NOT_GIVEN)
        own = ask(ctx, [user("x")], max_tokens=5, temperature=2.0)
        greedy = ask(ctx, [user("x")], temperature=0)
        turns = [AgentTrajectoryTurn(item=item, messages=[user("x")], response=r) for r in (plain, own, greedy)]
        [sample] = ctx.samples(turns)
    assert [len(turn.tokens) for turn in sample.turns] == [3, 5, 4]
    assert [row.temperature for row in sample.rows] == [0.5, 2.0, 1.0]
    scored = trainer.score_logprobs(
        "actor", [row.tokens for row in sample.rows], temperatures=[row.temperature for row in sample.rows]
    )
    for row, values in zip(sample.rows, scored, strict=True):
        assert [v for v, sampled in zip(values, row.sampled, strict=True) if sampled] == pytest.approx(
            [v for v, sampled in zip(row.logprobs, row.sampled, strict=True) if sampled], abs=1e-5
        )


@pytest.mark.parametrize("function", ["look_up", {"name": "look_up", "arguments": "[" * 5000}])
def test_a_malformed_call_in_the_history_is_refused_or_kept_as_text(trainer, function):
    history = [user("x"), {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, user("y")]
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        headers = {"Authorization": f"Bearer {ctx.api_key}"}
        body = {"model": "policy", "messages": history, "max_tokens": 4}
        answer = httpx.post(f"{ctx.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    if isinstance(function, str):
        assert answer.status_code == 400
        assert "is not a tool call" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


def test_a_session_may_keep_special_tokens_in_the_text(trainer):
    tokenizer = trainer.get_tokenizer()
    special = tokenizer.all_special_tokens[0]
    bias = {str(tokenizer.convert_tokens_to_ids(special)): 100}
    for skip, text in ((True, ""), (False, special * 3)):
        with trainer.rollout_session(sampling_params=sampling(skip_special_tokens=skip, ignore_eos=True)) as ctx:
            answer = ask(ctx, [user("x")], max_tokens=3, logit_bias=bias)
        assert answer.choices[0].message.content == text


def test_turns_of_a_conversation_at_two_temperatures_are_two_rows_and_train_once(trainer):
    [item] = batch_of(["x"]).iter_samples()
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        first = ask(ctx, [user("x")], temperature=0.7)
        messages = [user("x"), first.choices[0].message.model_dump(exclude_none=True), user("y")]
        second = ask(ctx, messages, temperature=1.3)
        turns = [AgentTrajectoryTurn(item, m, r) for m, r in (([user("x")], first), (messages, second))]
        [sample] = ctx.samples(turns)
    assert [row.temperature for row in sample.rows] == [0.7, 1.3]
    assert sample.rows[0].tokens == sample.rows[1].tokens
    both = list(zip(sample.rows[0].trained, sample.rows[1].trained, sample.rows[0].sampled, strict=True))
    assert all(a + b == sampled for a, b, sampled in both)
    assert any(a for a, _, _ in both)
    assert any(b for _, b, _ in both)


def test_several_agents_of_one_sample_give_several_rows(trainer):
    [item] = batch_of(["x"]).iter_samples()
    talks = [[{"role": "system", "content": f"You are {name}."}, user("x")] for name in ("planner", "doer")]
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        trajectories = [
            AgentTrajectory([AgentTrajectoryTurn(item=item, messages=talk, response=ask(ctx, talk))]) for talk in talks
        ]
        [sample] = ctx.samples(trajectories)
    assert len(sample.rows) == 2
    assert sample.forks == []
    assert sample.record.completion == "\n".join(turn.answer["content"] for turn in sample.turns)


def test_equal_answers_of_two_samples_are_not_mixed_up(trainer):
    """With a shared key, it is unknown which of two equal answers a follow-up continues; the rows must be right anyway."""
    items = list(batch_of(["x"], 2).iter_samples())
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        turns = {item.sample_index: [] for item in items}
        talks = {item.sample_index: [user("x")] for item in items}
        for step in range(3):
            for item in items if step % 2 else items[::-1]:
                talk = talks[item.sample_index]
                response = ask(ctx, talk, temperature=0)
                turns[item.sample_index].append(AgentTrajectoryTurn(item=item, messages=list(talk), response=response))
                talk += [response.choices[0].message.model_dump(exclude_none=True), user("more")]
        samples = ctx.samples([turns[0], turns[1]])
    assert samples[0].record.tokens == samples[1].record.tokens
    for sample in samples:
        [row] = sample.rows
        assert [t for t, c in zip(row.tokens, row.trained, strict=True) if c] == sample.record.tokens


def test_several_choices_of_one_request_are_branches(trainer):
    [item] = batch_of(["x"]).iter_samples()
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        response = ask(ctx, [user("x")], n=3, temperature=2.0)
        chosen = response.choices[1].message.model_dump(exclude_none=True)
        messages = [user("x"), chosen, user("go on")]
        after = ask(ctx, messages)
        records = [choice.model_extra["areno"] for choice in response.choices]
    assert len({record["turn"] for record in records}) == 3
    known = records[1]["input_tokens"] + records[1]["response_tokens"]
    assert after.model_extra["areno"]["input_tokens"][: len(known)] == known
    with (
        trainer.rollout_session(sampling_params=sampling()) as other,
        pytest.raises(ValueError, match="during this call"),
    ):
        other.samples([AgentTrajectoryTurn(item=item, messages=messages, response=after)])


def test_requests_for_the_same_prompt_get_distinct_seeds_that_repeat_in_every_run(trainer):
    first, again = (ConversationRecorder(trainer.get_tokenizer(), 3) for _ in range(2))
    asked = [([1, 2], 3), ([1, 2], 2), ([9], 1), ([1, 2], 4)]
    seeds = [first.seeds(prompt, samples) for prompt, samples in asked]
    assert len({seed for some in seeds for seed in some}) == 10
    assert [again.seeds(prompt, samples) for prompt, samples in asked] == seeds


def test_turns_without_a_response_use_their_own_tokens(trainer):
    [item] = batch_of(["x"]).iter_samples()
    tokenizer = trainer.get_tokenizer()
    prompt = tokenizer.apply_chat_template([user("x")], add_generation_prompt=True)["input_ids"]
    with trainer.rollout_session(sampling_params=sampling(max_new_tokens=3)) as ctx:
        sequence = trainer.rollout_token_batch([prompt], 1, sampling(max_new_tokens=3, ignore_eos=True))[0].sequences[0]
        turn = AgentTrajectoryTurn(
            item=item,
            messages=[user("x")],
            response_tokens=sequence.resp_tokens,
            response_logprobs=sequence.resp_logprobs,
        )
        [sample] = ctx.samples(turn)
    [row] = sample.rows
    assert row.tokens == prompt + sequence.resp_tokens
    assert row.logprobs[len(prompt) :] == sequence.resp_logprobs
    with pytest.raises(ValueError, match="2 response tokens and 1 log-probs"):
        AgentTrajectoryTurn(item=item, messages=[], response_tokens=[1, 2], response_logprobs=[0.0])


def test_a_continued_conversation_computes_its_prefix_once(trainer):
    [item] = batch_of(["x"]).iter_samples()
    engine = trainer.backend
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        talk = [user("word " * 60)]
        before = engine.load()
        for _ in range(8):
            response = ask(ctx, talk, max_tokens=8, key=ctx.get_api_key(item))
            talk += [response.choices[0].message.model_dump(exclude_none=True), user("and?")]
        after = engine.load()
    reused = after.reused_total - before.reused_total
    assert reused / (reused + after.prefilled_total - before.prefilled_total) > 0.8
    assert engine.loop.prefixes.tokens == 0  # the memory is free for training again


def test_samples_of_a_batch_are_ordered_by_prompt():
    batch = batch_of(["a", "b"], 2)
    assert isinstance(batch, AgentBatch)
    some = batch.only(list(batch.iter_samples())[1:3])
    assert [(i.prompt_index, i.sample_index) for i in some.iter_samples()] == [(0, 1), (1, 0)]
    assert len(some) == 2
