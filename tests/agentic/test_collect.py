"""An agent may do anything: a bad sample costs only itself, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn, LossMaskPolicy
from areno.api.agentic import collect as agent_calls
from areno.api.agentic.collect import AgentRunner, CollectedSamples
from tests.agentic.stage import batch_of, sampling

PROMPTS = ["What is 1 plus 2?", "What is 3 plus 4?"]
BAD = (1, 0)
ALL = {(prompt, sample) for prompt in range(2) for sample in range(2)}


def place(item: Any) -> tuple[int, int]:
    return item.prompt_index, item.sample_index


@contextmanager
def client_of(ctx: Any) -> Any:
    client = openai.OpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0)
    try:
        yield client
    finally:
        client.close()


async def ask(ctx: Any, item: Any, messages: list[Any] | None = None, **options: Any) -> AgentTrajectoryTurn:
    messages = messages or [{"role": "user", "content": item.prompt}]
    async with openai.AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        options = {"model": "policy", "max_tokens": 4, **options}
        response = await client.chat.completions.create(messages=messages, **options)
    return AgentTrajectoryTurn(item=item, messages=messages, response=response)


def collect(trainer: Any, agent: Any, *, timeout_s: float = 20, retries: int = 1, **options: Any) -> CollectedSamples:
    runner = AgentRunner(agent, LossMaskPolicy(), trainer.get_tokenizer(), timeout_s=timeout_s, retries=retries)
    options = {
        "sampling_params": sampling(max_new_tokens=4),
        "max_running_prompts": 8,
        "timeout_s": timeout_s,
        **options,
    }
    with trainer.rollout_session(**options) as ctx:
        return runner.collect(ctx.proxy, batch_of(PROMPTS, 2))


def check_nothing_left(trainer: Any) -> None:
    engine = trainer.backend
    engine.loop.wait_idle()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    deadline = time.monotonic() + 5
    mine = ("areno-agent", "areno-serving")
    while any(thread.name.startswith(mine) for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(mine)]


def only_bad_fails(collected: CollectedSamples, reason: str) -> None:
    assert {place(sample.item) for sample in collected.samples} == ALL - {BAD}
    assert collected.errors.keys() == {BAD}
    assert reason in collected.errors[BAD], collected.errors


def test_successful_samples_are_run_once_and_returned_in_order(trainer):
    calls = []

    async def agent(ctx, batch):
        calls.append(len(batch))
        return list(reversed(await asyncio.gather(*(ask(ctx, item) for item in batch.iter_samples()))))

    collected = collect(trainer, agent)
    assert [place(sample.item) for sample in collected.samples] == sorted(ALL)
    assert (collected.errors, collected.rerun, calls) == ({}, 0, [4])
    check_nothing_left(trainer)


@pytest.mark.parametrize(
    "problem", ["raises", "returns none", "drops", "foreign", "exits", "other task", "twice", "rubbish"]
)
def test_an_error_costs_only_its_own_sample(trainer, problem):
    foreign = {"choices": [{"message": {"role": "assistant", "content": "x"}}]}
    forged = foreign | {"areno": {"turn": "f" * 24, "response_tokens": [5], "response_logprobs": [-0.1]}}
    neighbors = []

    async def agent(ctx, batch):
        turns = []
        for item in batch.iter_samples():
            if place(item) != BAD:
                turns.append(await ask(ctx, item))
                neighbors.append(turns[-1])
            elif problem == "raises":
                raise KeyError("the agent's own mistake")
            elif problem == "exits":
                raise SystemExit(3)
            elif problem == "returns none":
                return None
            elif problem == "foreign":
                turns.append(AgentTrajectoryTurn(item=item, messages=[], response=foreign))
            elif problem == "other task":
                turns.append(AgentTrajectoryTurn(item=item, messages=[], response=neighbors[0].response))
            elif problem == "twice":
                turns += [turn := await ask(ctx, item), turn]
            elif problem == "rubbish":
                turns.append(AgentTrajectoryTurn(item=item, messages=[], response=forged))
        return turns

    collected = collect(trainer, agent)
    only_bad_fails(
        collected,
        {
            "raises": 'KeyError: "the agent\'s own mistake"',
            "returns none": "returned None",
            "drops": "no trajectory for this sample",
            "foreign": "does not include Areno trajectory metadata",
            "exits": "SystemExit: 3",
            "other task": "not recorded during this call of the agent",
            "twice": "same response twice",
            "rubbish": "not recorded during this call of the agent",
        }[problem],
    )
    check_nothing_left(trainer)


def test_errors_report_their_location_in_the_agent(trainer):
    async def agent(ctx, batch):
        raise ValueError("here")

    collected = collect(trainer, agent, retries=0)
    assert collected.errors.keys() == ALL
    assert f"{__file__}:" in collected.errors[BAD]


def test_a_hanging_agent_is_cancelled_with_all_its_tasks(trainer):
    cancelled = []

    async def forever():
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def agent(ctx, batch):
        turns = []
        for item in batch.iter_samples():
            if place(item) == BAD:
                asyncio.create_task(forever())  # noqa: RUF006
                await forever()
            turns.append(await ask(ctx, item))
        return turns

    began = time.monotonic()
    only_bad_fails(collect(trainer, agent, timeout_s=1.5), "timed out after 1.5 s (--agent-timeout-s)")
    assert time.monotonic() - began < 25
    assert len(cancelled) == 4  # two tasks each in the first call and in the retry
    check_nothing_left(trainer)


def test_requests_of_a_hanging_agent_are_aborted(trainer):
    async def agent(ctx, batch):
        options = {"max_tokens": 3500, "extra_body": {"ignore_eos": True}}
        await asyncio.gather(*(ask(ctx, item, **options) for item in batch.iter_samples()))

    collected = collect(trainer, agent, timeout_s=1, retries=0)
    assert collected.errors.keys() == ALL
    check_nothing_left(trainer)


def test_a_plain_function_can_be_an_agent_and_its_requests_do_not_block_the_server(trainer):
    def agent(ctx, batch):
        with client_of(ctx) as client:
            for item in batch.iter_samples():
                messages = [{"role": "user", "content": item.prompt}]
                response = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
                yield AgentTrajectory([AgentTrajectoryTurn(item=item, messages=messages, response=response)])

    collected = collect(trainer, agent)
    assert {place(sample.item) for sample in collected.samples} == ALL
    check_nothing_left(trainer)


def test_what_an_agent_has_yielded_counts_even_if_it_fails_later(trainer):
    calls = []

    async def agent(ctx, batch):
        calls.append([place(item) for item in batch.iter_samples()])
        for item in batch.iter_samples():
            if place(item) == BAD:
                raise RuntimeError("no more")
            yield await ask(ctx, item)

    collected = collect(trainer, agent)
    only_bad_fails(collected, "RuntimeError: no more")
    assert sorted(calls[1:]) == [[(1, 0)], [(1, 1)]]
    assert collected.rerun == 2


def test_a_hanging_plain_function_is_abandoned_and_its_key_revoked(trainer, monkeypatch):
    monkeypatch.setattr(agent_calls, "GRACE_S", 0.3)
    refused = []
    release = threading.Event()

    def agent(ctx, batch):
        items = list(batch.iter_samples())
        with client_of(ctx) as client:
            if place(items[0]) == BAD:
                release.wait(30)
                for key in (ctx.api_key, ctx.get_api_key(items[0])):
                    answer = httpx.get(ctx.base_url + "/models", headers={"Authorization": f"Bearer {key}"})
                    refused.append(answer.status_code)
            turns = []
            for item in items:
                if place(item) == BAD:
                    release.wait(30)
                messages = [{"role": "user", "content": item.prompt}]
                response = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
                turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=response))
            return turns

    runner = AgentRunner(agent, LossMaskPolicy(), trainer.get_tokenizer(), timeout_s=2, retries=1)
    with trainer.rollout_session(sampling_params=sampling(max_new_tokens=4), timeout_s=2) as ctx:
        collected = runner.collect(ctx.proxy, batch_of(PROMPTS, 2))
        only_bad_fails(collected, "timed out after 2 s")
        release.set()
        deadline = time.monotonic() + 10
        while len(refused) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert refused == [401, 401]
    check_nothing_left(trainer)


def test_a_client_that_disconnects_mid_stream_leaves_no_turn(trainer):
    async def agent(ctx, batch):
        turns = []
        for item in batch.iter_samples():
            if place(item) == BAD:
                async with openai.AsyncOpenAI(base_url=ctx.get_base_url(item), api_key="none", max_retries=0) as client:
                    stream = await client.chat.completions.create(
                        model="policy",
                        messages=[{"role": "user", "content": item.prompt}],
                        max_tokens=3500,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    async for chunk in stream:
                        if chunk.choices[0].delta.content:
                            break
                    await stream.close()
                turns.append(ctx.trajectory(item))
            else:
                turns.append(await ask(ctx, item))
        return turns

    only_bad_fails(collect(trainer, agent), "no trajectory for this sample")
    check_nothing_left(trainer)


def test_a_prompt_beyond_the_context_gets_an_empty_answer_that_ends_by_length(trainer):
    async def agent(ctx, batch):
        turns = []
        for item in batch.iter_samples():
            long = [{"role": "user", "content": item.prompt * 100}]
            turns.append(await ask(ctx, item, long if place(item) == BAD else None))
            choice = turns[-1].response.choices[0]
            if place(item) == BAD:
                assert (choice.finish_reason, choice.message.content) == ("length", "")
        return turns

    collected = collect(trainer, agent, sampling_params=sampling(max_new_tokens=4, max_context_len=40))
    assert {place(sample.item): sample.context_full for sample in collected.samples} == {p: p == BAD for p in ALL}
    bad = next(sample for sample in collected.samples if place(sample.item) == BAD)
    assert bad.longest > 400
    assert bad.rows == []


def test_an_answer_stops_at_the_context_limit(trainer):
    async def agent(ctx, batch):
        return [await ask(ctx, item, max_tokens=500, extra_body={"ignore_eos": True}) for item in batch.iter_samples()]

    collected = collect(trainer, agent, sampling_params=sampling(max_context_len=30))
    assert {sample.longest for sample in collected.samples} == {30}
    assert {sample.record.metadata["finish_reason"] for sample in collected.samples} == {"length"}


def test_equal_seeds_repeat_the_samples(trainer):
    async def agent(ctx, batch):
        return await asyncio.gather(*(ask(ctx, item) for item in batch.iter_samples()))

    def sampled(seed):
        collected = collect(trainer, agent, seed=seed)
        return sorted((sample.item.prompt_index, tuple(sample.record.tokens)) for sample in collected.samples)

    assert sampled(3) == sampled(3) != sampled(4)


def test_turns_of_unknown_tasks_are_dropped(trainer, caplog):
    stranger = next(iter(batch_of(["x"] * 9, 1).only(list(batch_of(["x"] * 9, 1).iter_samples())[8:]).iter_samples()))

    async def agent(ctx, batch):
        turns = [await ask(ctx, item) for item in batch.iter_samples()]
        return [*turns, await ask(ctx, stranger)]

    collected = collect(trainer, agent)
    assert {place(sample.item) for sample in collected.samples} == ALL
    assert "prompt 8, sample 0: the batch of this agent call did not contain this sample" in caplog.text
