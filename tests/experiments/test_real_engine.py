"""Episodes with a real model: tokens, log-probs and versions are those of the engine, also while its weights change."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import DataError, EngineError, UsageError
from areno.rollouts.dispatcher import BatchDispatcher
from areno.rollouts.engine_client import EngineClient, ModelRequest, sampling_params
from areno.rollouts.shared_engine import SharedEngine
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.trajectory import train_sequences
from areno.rollouts.workflows.base import GroupedRolloutWorkflow, RolloutWorkflow
from areno.rollouts.workflows.resolve import resolve_workflow
from areno.rollouts.workflows.rewards import AsyncReward
from areno.rollouts.workflows.rlvr import RLVRWorkflow
from areno.serving.generation import Generation as ServedGeneration
from areno.serving.metrics import ServingMetrics
from areno.types import Request, SamplingParams
from tests.experiments.stage import Generation, open_engine

ROWS = [{"prompt": f"What is {a} plus {a}?", "answer": str(2 * a)} for a in range(20)]


def one(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return 1.0


def stock_logprobs(checkpoint: Any, tokens: list[int], temperature: float, weights: Any = None) -> list[float]:
    """Log-probs by stock transformers with these weights, in float64 from the logits on."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double() / temperature
    table = torch.log_softmax(logits, -1)
    return [0.0] + [float(table[place, token]) for place, token in enumerate(tokens[1:])]


def test_tokens_carry_logprobs_and_versions(engine, tiny_checkpoint):
    async def ask() -> Any:
        gconfig = Generation(max_new_tokens=12, temperature=0.7)
        return await EngineClient(engine).agenerate(ModelRequest([5, 9, 11], gconfig))

    answer = asyncio.run(ask())
    assert len(answer.output_tokens) == 12
    assert answer.stop_reason == "length"
    assert answer.output_versions == [0] * 12
    wanted = stock_logprobs(tiny_checkpoint, [5, 9, 11, *answer.output_tokens], 0.7)[3:]
    assert answer.output_logprobs == pytest.approx(wanted, abs=1e-4)
    assert answer.ttft == answer.latency > 0


def test_each_token_has_the_version_that_sampled_it_when_weights_change_during_an_episode(tiny_checkpoint):
    """Each token's log-prob is checked against the weights of the version that it claims."""
    with open_engine(tiny_checkpoint) as engine:
        model = engine.inner.actor.model.module
        kept: dict[int, dict[str, torch.Tensor]] = {}

        def snapshot(version: int) -> None:
            kept[version] = {name: value.clone() for name, value in model.state_dict().items()}

        snapshot(0)
        staleness = StalenessManager(max_concurrent_rollouts=4, consumer_batch_size=4, max_head_offpolicyness=3)
        workflow = GroupedRolloutWorkflow(
            RLVRWorkflow(AsyncReward(one), Generation(max_new_tokens=150), engine.tokenizer), 2
        )
        with BatchDispatcher(EngineClient(engine), staleness, check_trajectory_format=True) as dispatcher:
            done: list[Any] = []
            waiter = threading.Thread(
                target=lambda: done.append(dispatcher.prepare_batch(iter(itertools.cycle(ROWS)), workflow))
            )
            waiter.start()
            for version in (1, 2, 3):
                before = engine.load().generated_total
                deadline = time.monotonic() + 30
                while engine.load().generated_total < before + 40 and not done and time.monotonic() < deadline:
                    time.sleep(0.002)
                with engine.loop.weights_changing(version), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.02 * torch.randn_like(parameter))
                    snapshot(version)
            waiter.join(60)
        versions_seen, mixed = set(), 0
        for row in train_sequences(done[0].trajectories, 0):
            trajectory = next(
                t
                for t in done[0].trajectories
                if any(row.tokens == ids[: len(row.tokens)].tolist() for ids in t["input_ids"])
            )
            index = [ids[: len(row.tokens)].tolist() for ids in trajectory["input_ids"]].index(row.tokens)
            versions = trajectory["versions"][index][: len(row.tokens)].tolist()
            sampled = [version for version in versions if version >= 0]
            assert sampled == sorted(sampled)
            versions_seen |= set(sampled)
            mixed += len(set(sampled)) > 1
            for version in set(sampled):
                wanted = stock_logprobs(tiny_checkpoint, row.tokens, 1.0, kept[version])
                for place, stamped in enumerate(versions):
                    if stamped == version:
                        assert row.logprobs[place] == pytest.approx(wanted[place], abs=2e-4)
        assert mixed > 0
        assert len(versions_seen) >= 2


def test_groups_share_one_prompt_and_differ_in_their_draws(engine):
    with one_batch(engine, Generation(max_new_tokens=10), n_samples=3, batch=2) as found:
        assert len(found.trajectories) == 2
        for trajectory in found.trajectories:
            assert trajectory["input_ids"].shape[0] == trajectory["rewards"].shape[0] == 3
            pairs = zip(trajectory["input_ids"], trajectory["attention_mask"], strict=True)
            samples = [tuple(ids[keep].tolist()) for ids, keep in pairs]
            assert len(set(samples)) == 3


def test_equal_seeds_give_equal_trajectories(engine):
    with one_batch(engine, Generation(), seed=3) as first, one_batch(engine, Generation(), seed=3) as again:
        assert torch.equal(first.trajectories[0]["input_ids"], again.trajectories[0]["input_ids"])
    with one_batch(engine, Generation(), seed=4) as other:
        assert first.trajectories[0]["input_ids"].tolist() != other.trajectories[0]["input_ids"].tolist()


class Pairs(RolloutWorkflow):
    """Asks twice for several answers, and records the answers of each request."""

    def __init__(self, answers: int) -> None:
        self.answers, self.found = answers, []

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> None:
        for _ in range(2):
            request = ModelRequest([5, 6, 7], Generation(max_new_tokens=12))
            self.found.append([answer.output_tokens for answer in await engine.agenerate_group(request, self.answers)])


def test_all_answers_of_a_group_have_their_own_seeds(engine):
    pairs, single = Pairs(2), Pairs(1)
    for workflow in (pairs, single):
        asyncio.run(GroupedRolloutWorkflow(workflow, 3).arun_episode(EngineClient(engine, seed=2), {}))
    assert len({tuple(tokens) for answers in pairs.found for tokens in answers}) == 12
    # The first answers have the documented seeds: of the run, the row, the sample and the request.
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    seeds = [derive_seed(2, -1, sample, draw) for sample in range(3) for draw in range(2)]
    (future,) = engine.submit([Request([5, 6, 7], sampling, seeds)])
    expected = sorted(sequence.resp_tokens for sequence in future.result(timeout=60).sequences)
    for workflow in (pairs, single):
        assert sorted(answers[0] for answers in workflow.found) == expected


def test_an_exception_while_a_shared_engine_generates_aborts_the_running_answers(engine):
    shared = SharedEngine(engine)
    request = Request([5, 6], SamplingParams(max_new_tokens=3000, ignore_eos=True), [1])
    with pytest.raises(KeyboardInterrupt), shared.generating():
        (future,) = shared.submit([request])
        raise KeyboardInterrupt
    assert future.result(timeout=10).sequences[0].finish_reason == "abort"
    with shared.generating():
        (future,) = shared.submit([Request([5, 6], SamplingParams(max_new_tokens=20, ignore_eos=True), [1])])
    assert len(future.result(timeout=0).sequences[0].resp_tokens) == 20, "an orderly exit waits"


def test_a_request_that_is_cancelled_before_a_shared_engine_generates_ends_without_tokens(engine):
    async def cancelled() -> list[Any]:
        request = Request([5, 6], SamplingParams(max_new_tokens=3), [1])
        waiting = ServedGeneration(SharedEngine(engine), ServingMetrics(), [request], ended.set, streams=True)
        waiting.cancel()
        return [tokens async for tokens in waiting.tokens()]

    ended = threading.Event()
    assert asyncio.run(cancelled()) == []
    assert ended.is_set()


class one_batch:  # noqa: N801  (reads as a function)
    def __init__(self, engine: Any, gconfig: Generation, *, n_samples: int = 2, batch: int = 1, seed: int = 0) -> None:
        workflow = RLVRWorkflow(AsyncReward(one), gconfig, engine.tokenizer)
        staleness = StalenessManager(consumer_batch_size=batch)
        self.dispatcher = BatchDispatcher(EngineClient(engine, seed=seed), staleness, check_trajectory_format=True)
        self.workflow = GroupedRolloutWorkflow(workflow, n_samples)

    def __enter__(self) -> Any:
        return self.dispatcher.prepare_batch(iter(itertools.cycle(ROWS)), self.workflow)

    def __exit__(self, *_: object) -> None:
        self.dispatcher.close()


def test_truncation_comes_from_the_engine_and_not_from_padding(engine):
    """One answer ends at the limit and one at a stop token; only the first is truncated."""

    async def ask(gconfig: Generation, seed: int) -> Any:
        workflow = RLVRWorkflow(AsyncReward(one), gconfig, engine.tokenizer)
        try:
            return await workflow.arun_episode(EngineClient(engine, seed=seed), ROWS[1])
        finally:
            await workflow.aclose()

    cut = asyncio.run(ask(Generation(max_new_tokens=6), 1))
    last = int(cut["input_ids"][0, -1])
    first_place = cut["input_ids"][0].tolist()[-6:].index(last)
    whole = asyncio.run(ask(Generation(max_new_tokens=6, stop_token_ids=[last]), 1))
    assert bool(cut["truncated"][0])
    assert not bool(whole["truncated"][0])
    rows = train_sequences([cut, whole], eos_token_id=1)
    assert [row.truncated for row in rows] == [True, False]
    assert len(rows[1].tokens) == len(rows[0].tokens) - (5 - first_place)


def test_stop_tokens_are_masked_before_the_minimum_length(engine):
    """All tokens but one are stop tokens, so without a minimum length the first token ends the answer."""

    async def lengths(minimum: int) -> list[int]:
        vocab = engine.inner.vocab_size
        # Before the minimum length, only token 7 can be sampled.
        gconfig = Generation(
            max_new_tokens=9, min_new_tokens=minimum, stop_token_ids=[t for t in range(vocab) if t != 7]
        )
        answers = await EngineClient(engine).agenerate_group(ModelRequest([5, 6], gconfig), 4)
        assert all(answer.output_tokens[:minimum] == [7] * minimum for answer in answers)
        assert all(math.isfinite(logprob) for answer in answers for logprob in answer.output_logprobs)
        return [len(answer.output_tokens) for answer in answers]

    assert asyncio.run(lengths(0)) == [1] * 4
    assert min(asyncio.run(lengths(5))) == 6  # and the sixth token ends it


def test_cancelling_a_coroutine_frees_the_engine(engine):
    async def main() -> None:
        task = asyncio.create_task(
            EngineClient(engine).agenerate(ModelRequest([5, 6], Generation(max_new_tokens=3000, max_tokens=4000)))
        )
        while not engine.load().running:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 20
        while engine.load().running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        assert not engine.load().running

    asyncio.run(main())


def test_a_late_request_is_an_error_that_names_the_option(engine):
    client = EngineClient(engine, request_timeout=0.05, request_retries=1)
    request = ModelRequest([5, 6], Generation(max_new_tokens=3000, max_tokens=4000), rid="r7")
    with pytest.raises(EngineError, match=r"request r7 got no answer within 0.05 s \(rollout.request_timeout\)"):
        asyncio.run(client.agenerate(request))


def test_an_aborted_request_is_sent_again(engine):
    """All requests are cancelled once from outside; the final answer is complete."""

    async def main() -> Any:
        client = EngineClient(engine, request_retries=2)
        task = asyncio.create_task(client.agenerate(ModelRequest([5, 6], Generation(max_new_tokens=200))))
        while engine.load().generated_total == before:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(engine.loop.cancel_all)
        return await task

    before = engine.load().generated_total
    assert len(asyncio.run(main()).output_tokens) == 200


@pytest.mark.parametrize(
    ("changes", "prompt", "context", "wanted"),
    [
        ({"max_new_tokens": 50, "max_tokens": 40}, 10, None, 30),
        ({"max_new_tokens": 50, "max_tokens": 400}, 10, 32, 22),
        ({"max_new_tokens": 5, "max_tokens": 400}, 10, 32, 5),
    ],
)
def test_the_token_limit_of_an_answer(changes, prompt, context, wanted):
    assert sampling_params(Generation(**changes), prompt, context).max_new_tokens == wanted


def test_sampling_settings_reach_the_engine():
    found = sampling_params(
        Generation(top_k=40, top_p=0.9, temperature=0.5, stop=["x"], stop_token_ids=[3], frequency_penalty=0.25), 4
    )
    assert (found.top_k, found.top_p, found.temperature, found.stop) == (40, 0.9, 0.5, ["x"])
    assert (found.stop_token_ids, found.frequency_penalty, found.ignore_eos) == ([3], 0.25, True)
    assert sampling_params(Generation(), 4).top_k == -1


def test_settings_without_effect_and_prompts_without_room_are_refused():
    with pytest.raises(UsageError, match="use_beam_search is not supported"):
        sampling_params(Generation(use_beam_search=True), 4)
    with pytest.raises(DataError, match="a prompt of 300 tokens leaves no room for an answer within the limit of 256"):
        sampling_params(Generation(), 300)
    with pytest.raises(
        DataError, match=r"within the limit of 256 tokens; raise gconfig\.max_tokens, or set the data set's max_length"
    ):
        sampling_params(Generation(), 300, 1000)
    with pytest.raises(DataError, match="within the limit of 32 tokens; set the data set's max_length to skip"):
        sampling_params(Generation(), 300, 32)
    with pytest.raises(UsageError, match="gconfig: temperature must be above 0"):
        sampling_params(replace(Generation(), temperature=0.0), 4)


def test_training_rows_keep_groups_apart_when_a_group_lost_samples(engine):
    class Losing(RLVRWorkflow):
        async def arun_group(self, engine: Any, data: dict[str, Any], samples: int) -> Any:
            found = list(await super().arun_group(engine, data, samples))
            return [None, *found[1:]] if data["answer"] == "0" else found

    workflow = resolve_workflow(
        Losing,
        Generation(),
        workflow_kwargs={"reward_fn": one, "gconfig": Generation(), "tokenizer": engine.tokenizer},
        n_samples=3,
    )
    with BatchDispatcher(EngineClient(engine), StalenessManager(consumer_batch_size=3)) as dispatcher:
        partial = dispatcher.prepare_batch(iter(ROWS), workflow)
    rows = train_sequences(partial.trajectories, 1)
    sizes = [sum(row.group == group for row in rows) for group in range(3)]
    assert sorted(sizes) == [2, 3, 3]
    for group, trajectory in enumerate(partial.trajectories):
        mine = [row for row in rows if row.group == group]
        assert len(mine) == len(trajectory["rewards"])
        prompt = mine[0].tokens[: sum(mine[0].prompt_mask)]
        assert all(row.tokens[: len(prompt)] == prompt for row in mine)  # one prompt per group
