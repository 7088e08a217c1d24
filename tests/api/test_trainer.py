"""The SDK in this process, with a tiny checkpoint: sessions, training with any loss, saving, and what is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import httpx
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import areno
from areno import ArenoConfig, SamplingParams, Trainer, TrainSequence
from areno.api.backend.base import BackendType, get_backend
from areno.errors import CheckpointError, EngineError, UsageError
from areno.loss_fns import gspo_loss_fn
from tests.support.tiny import save_tiny_checkpoint

PROMPTS = ["What is 3 plus 4?", "What is 11 plus 12 plus 13?"]
SAMPLING = SamplingParams(max_new_tokens=8)


def open_trainer(checkpoint, **config):
    trainer = Trainer(world_size=1, model_path=str(checkpoint), custom_config=ArenoConfig(**config))
    trainer.init()
    return trainer


@pytest.fixture(scope="module")
def shared(tiny_checkpoint):
    """A trainer for tests that do not change its weights."""
    with open_trainer(tiny_checkpoint) as trainer:
        yield trainer


@pytest.fixture
def trainer(tiny_checkpoint):
    with open_trainer(tiny_checkpoint, optimizer={"lr": 1e-2}) as trainer:
        yield trainer


def session(trainer, sampling=SAMPLING, **options):
    return trainer.rollout_session(sampling_params=sampling, proxy=False, **options)


def tokens_of(results):
    return [[sequence.resp_tokens for sequence in result.sequences] for result in results]


def row(prompt, response, advantage=1.0):
    return TrainSequence(
        prompt_mask=[True] * len(prompt) + [False] * len(response),
        tokens=[*prompt, *response],
        logprobs=[0.0] * len(prompt) + [-1.0] * len(response),
        advantages=[0.0] * len(prompt) + [advantage] * len(response),
    )


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_rollout_outside_a_session_says_how_to_open_one(shared):
    with pytest.raises(
        EngineError, match=r"async with trainer\.rollout_session\(sampling_params=\.\.\., proxy=False\)"
    ):
        shared.rollout_batch(PROMPTS, 1, SAMPLING)
    with pytest.raises(EngineError, match="outside a session"):
        shared.rollout_token_batch([[1, 2]], 1, SAMPLING)


def test_sessions_nest_and_the_outermost_one_ends_the_rollout(shared):
    with session(shared):
        with session(shared):
            shared.rollout_token_batch([[5, 6]], 1, SAMPLING)
        assert len(shared.rollout_token_batch([[5, 6]], 1, SAMPLING)) == 1
    with pytest.raises(EngineError, match="outside a session"):
        shared.rollout_token_batch([[5, 6]], 1, SAMPLING)


def test_an_error_inside_a_session_leaves_nothing_behind(shared):
    pending = []
    with pytest.raises(KeyError), session(shared):
        long = SamplingParams(max_new_tokens=2000, ignore_eos=True)
        pending = shared.backend.submit([areno.types.Request([5, 6], long, [0, 1])])
        raise KeyError("a user's mistake")
    aborted = pending[0].result(timeout=10)
    assert {sequence.finish_reason for sequence in aborted.sequences} == {"abort"}
    with pytest.raises(EngineError, match="outside a session"):
        shared.rollout_token_batch([[5, 6]], 1, SAMPLING)
    with session(shared):
        again = shared.rollout_token_batch([[5, 6]], 2, SAMPLING)
    assert [len(sequence.resp_tokens) for sequence in again[0].sequences] == [8, 8]


def test_leaving_a_session_that_was_not_entered_is_an_error(shared):
    with pytest.raises(EngineError, match="begin_rollout_session"):
        shared.end_rollout_session()
    with session(shared):
        assert shared.rollout_token_batch([[5, 6]], 1, SAMPLING)


def test_async_sessions_and_rollouts_give_the_same_tokens_as_blocking_ones(tiny_checkpoint):
    async def main(trainer):
        async with session(trainer):
            return await trainer.rollout_token_batch_async([[5, 6, 7]], 3, SAMPLING)

    with open_trainer(tiny_checkpoint) as first, open_trainer(tiny_checkpoint) as second:
        with session(second):
            blocking = second.rollout_token_batch([[5, 6, 7]], 3, SAMPLING)
        assert tokens_of(asyncio.run(main(first))) == tokens_of(blocking)


def test_sessions_have_an_endpoint_unless_the_proxy_is_disabled(shared):
    with shared.rollout_session(sampling_params=SAMPLING) as ctx:
        assert httpx.get(f"{ctx.base_url}/models", headers={"Authorization": f"Bearer {ctx.api_key}"}).is_success
        assert httpx.get(f"{ctx.base_url}/models").status_code == 401
    with session(shared) as plain, pytest.raises(RuntimeError, match="open the session with proxy=True"):
        plain.get_base_url()


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_carry_text_logprobs_and_finish_reason(shared):
    with session(shared):
        results = shared.rollout_batch(PROMPTS, 3, SamplingParams(max_new_tokens=40))
    tokenizer, eos = shared.get_tokenizer(), shared.get_tokenizer().eos_token_id
    assert [len(result.sequences) for result in results] == [3, 3]
    for sequence in (s for result in results for s in result.sequences):
        assert sequence.text == tokenizer.decode(sequence.resp_tokens, skip_special_tokens=True)
        assert len(sequence.resp_logprobs) == len(sequence.resp_tokens)
        assert max(sequence.resp_logprobs) <= 0
        ended = sequence.resp_tokens[-1] == eos
        assert sequence.finish_reason == ("stop" if ended else "length")
        assert ended or len(sequence.resp_tokens) == 40


def test_special_tokens_stay_in_the_text_on_request(shared):
    sampling = SamplingParams(max_new_tokens=300, skip_special_tokens=False)
    with session(shared):
        results = shared.rollout_batch(PROMPTS, 8, sampling)
    ended = [s for result in results for s in result.sequences if s.finish_reason == "stop"]
    assert ended
    assert all(sequence.text.endswith("<|end|>") for sequence in ended)


def test_a_stop_string_ends_generation_and_is_cut_from_the_text(shared):
    greedy = SamplingParams(greedy=True, max_new_tokens=30, ignore_eos=True)
    with session(shared):
        free = shared.rollout_batch(PROMPTS[:1], 1, greedy)[0].sequences[0]
        middle = len(free.text) // 2
        stop = free.text[middle : middle + 3]
        sampling = SamplingParams(greedy=True, max_new_tokens=30, ignore_eos=True, stop=[stop])
        cut = shared.rollout_batch(PROMPTS[:1], 1, sampling)[0].sequences[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.resp_tokens == free.resp_tokens[: len(cut.resp_tokens)]


def test_a_prompt_longer_than_max_prompt_len_is_refused_with_its_index(shared):
    sampling = SamplingParams(max_prompt_len=3)
    with session(shared), pytest.raises(UsageError, match="prompt 1 has 4 tokens, more than max_prompt_len=3"):
        shared.rollout_token_batch([[1, 2, 3], [1, 2, 3, 4]], 1, sampling)


def test_the_same_seed_gives_the_same_tokens_in_a_new_trainer(tiny_checkpoint):
    def draw(seed):
        with open_trainer(tiny_checkpoint) as trainer:
            trainer.seed = seed
            with session(trainer):
                return [tokens_of(trainer.rollout_batch(PROMPTS, 2, SAMPLING)) for _ in range(2)]

    first, again, other = draw(7), draw(7), draw(8)
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_prompt_batches_are_tokenized_in_order_without_long_prompts(shared):
    rows = [{"prompt": f"What is {n} plus {n}?", "solutions": [str(2 * n)]} for n in range(5)]
    rows.insert(1, {"prompt": "word " * 200, "solutions": []})
    batches = list(shared.load_prompt_batches(rows, batch_size=3, max_prompt_tokens=40))
    assert [item.solutions for batch in batches for item in batch.items] == [["0"], ["2"], ["4"], ["6"], ["8"]]
    assert [len(batch.items) for batch in batches] == [3, 2]
    assert batches[0].skipped_long == 1
    decoded = shared.get_tokenizer().decode(batches[0].items[0].input_tokens)
    assert decoded == "<|user|>What is 0 plus 0?<|end|><|assistant|>"


# -- training ----------------------------------------------------------------------------------------------------------


def test_any_closure_can_be_the_loss(trainer):
    seen = []

    def make_loss(scale):
        def loss(data_pack, logprobs):
            seen.append(int(data_pack["packed_response_mask"].sum()))
            return -scale * (logprobs * data_pack["packed_response_mask"]).mean(), {"scale": scale}

        return loss

    rows = [row([5, 6, 7], [8, 9]), row([5], [10, 11, 12])]
    before = trainer.score_logprobs("actor", [rows[0].tokens])[0]
    stats = trainer.train(rows, make_loss(2.0), mini_bs=1)
    after = trainer.score_logprobs("actor", [rows[0].tokens])[0]
    assert seen == [2, 3]
    assert stats["scale"] == pytest.approx(2.0)
    assert stats["grad_norm"] > 0
    assert stats["lr"] == 1e-2
    assert sum(after[-2:]) > sum(before[-2:])
    assert trainer.train(rows, lambda pack, logprobs: -logprobs.mean())["grad_norm"] > 0


def test_training_requires_rows_a_callable_and_a_positive_size(trainer):
    with pytest.raises(ValueError, match="at least one row"):
        trainer.train([], lambda pack, logprobs: logprobs.sum())
    with pytest.raises(TypeError, match="loss_fn must be callable, got str"):
        trainer.train([row([1], [2])], "gspo")
    with pytest.raises(ValueError, match="mini_bs must be at least 1, got 0"):
        trainer.train([row([1], [2])], lambda pack, logprobs: logprobs.sum(), mini_bs=0)


def test_an_error_in_a_loss_reaches_the_caller_and_the_trainer_stays_usable(trainer):
    def broken(pack, logprobs):
        raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError, match="in the loss"):
        trainer.train([row([5], [6, 7])], broken)
    assert trainer.train([row([5], [6, 7])], lambda pack, logprobs: -logprobs.mean())["update_skipped"] == 0
    with session(trainer):
        assert trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)[0].sequences[0].versions[0] == 1


@pytest.mark.parametrize("inside", [False, True])
def test_an_evaluation_is_not_part_of_the_times_of_a_step(trainer, inside, caplog):
    def evaluate():
        trainer.evaluate([{"prompt": PROMPTS[0]}], lambda record: time.sleep(1.0) or 1.0, sampling_params=SAMPLING)

    with session(trainer):
        trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)
        time.sleep(0.1)
        if inside:
            evaluate()
    with caplog.at_level("INFO"):
        if not inside:
            evaluate()
        assert not [line for line in caplog.messages if line.startswith("time rollout=")]
    stats = trainer.train([row([5], [6, 7])], lambda pack, logprobs: -logprobs.mean())
    assert 0.1 <= stats["step_rollout_time_s"] <= stats["step_e2e_time_s"] - stats["step_train_time_s"] < 1.0


def normalize_rewards(rewards):
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / max(deviation, 1e-6) for reward in rewards]


def test_one_gspo_step_as_documented(tiny_checkpoint, tmp_path):
    async def main():
        trainer = Trainer(
            world_size=1,
            model_path=str(tiny_checkpoint),
            backend_type=areno.Areno,
            custom_config=areno.ArenoConfig(tp_size=1),
            metrics_log_dir=str(tmp_path / "events"),
        )
        trainer.init()
        tokenizer = trainer.get_tokenizer()
        texts = ["a", "b " * 50, "c", "d " * 50, "e " * 50]
        prompts = trainer.load_prompt_batches([{"prompt": text} for text in texts], batch_size=1, max_prompt_tokens=40)
        assert [len(batch.items) for batch in prompts] == [1, 1]
        prompt_tokens = tokenizer.encode("What is 1 plus 1?")
        sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
        async with trainer.rollout_session(sampling_params=sampling, proxy=False):
            rollout = trainer.rollout_token_batch([prompt_tokens], n_samples=4, sampling_params=sampling)[0]
        rewards = [float(len(set(seq.resp_tokens))) for seq in rollout.sequences]
        batch = [
            TrainSequence(
                prompt_mask=[True] * len(prompt_tokens) + [False] * len(seq.resp_tokens),
                tokens=prompt_tokens + seq.resp_tokens,
                logprobs=[0.0] * len(prompt_tokens) + seq.resp_logprobs,
                advantages=[0.0] * len(prompt_tokens) + [advantage] * len(seq.resp_tokens),
                reward=reward,
                eos_token_id=tokenizer.eos_token_id,
            )
            for seq, reward, advantage in zip(rollout.sequences, rewards, normalize_rewards(rewards), strict=True)
        ]
        stats = trainer.train(batch, partial(gspo_loss_fn, clip_eps=3.0e-4), mini_bs=4)
        trainer.close()
        return stats

    stats = asyncio.run(main())
    assert stats["logp_abs_diff_mean"] < 1e-5
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["grad_norm"] > 0
    assert stats["step_rollout_time_s"] > 0
    assert stats["step_e2e_time_s"] >= stats["step_rollout_time_s"] + stats["step_train_time_s"] - 1e-6
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.value for event in events.Scalars("rollout/skipped_long")] == [3]


def test_events_are_written_again_after_a_trainer_is_closed_and_initialized(tiny_checkpoint, tmp_path):
    trainer = Trainer(1, str(tiny_checkpoint), metrics_log_dir=str(tmp_path))
    for _ in range(2):
        trainer.init()
        trainer.train([row([5, 6], [7, 8])], gspo_loss_fn)
        trainer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_gives_the_same_logits_in_transformers(trainer, tmp_path):
    rows = [row([5, 6, 7], [8, 9, 10])]
    trainer.train(rows, lambda pack, logprobs: -logprobs.mean())
    saved = trainer.save_checkpoint(str(tmp_path / "out"))
    assert saved == str(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    ids = torch.tensor([rows[0].tokens])
    with torch.inference_mode():
        logprobs = plain(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert trainer.score_logprobs("actor", [rows[0].tokens])[0][1:] == pytest.approx(logprobs.tolist(), abs=1e-5)
    assert AutoTokenizer.from_pretrained(saved).chat_template == trainer.get_tokenizer().chat_template


def test_a_checkpoint_that_cannot_be_written_is_a_checkpoint_error(shared, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"cannot save a checkpoint to {path}: .*; choose another folder"):
            shared.save_checkpoint(path)


def test_tied_weights_stay_tied_through_training_and_reloading(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    with open_trainer(checkpoint, optimizer={"lr": 1e-2}) as trainer:
        module = trainer.backend.actor.model.module
        before = module.lm_head.weight.detach().clone()
        trainer.train([row([5, 6, 7], [8, 9, 10])], lambda pack, logprobs: -logprobs.mean())
        assert module.lm_head.weight is module.get_input_embeddings().weight
        trained = module.lm_head.weight.detach().clone()
        assert not torch.equal(trained, before)
        trainer.save_checkpoint(str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert torch.equal(again.lm_head.weight, trained)
    with open_trainer(tmp_path / "out") as reopened:
        module = reopened.backend.actor.model.module
        assert module.lm_head.weight is module.get_input_embeddings().weight


# -- life cycle and configuration --------------------------------------------------------------------------------------


def test_closing_twice_is_fine_and_ends_the_threads(tiny_checkpoint):
    before = threading.active_count()
    trainer = open_trainer(tiny_checkpoint)
    with session(trainer):
        trainer.rollout_batch(PROMPTS, 1, SAMPLING)
    trainer.close()
    trainer.close()
    assert threading.active_count() <= before
    with pytest.raises(EngineError, match=r"or was closed; call trainer\.init\(\) first"):
        trainer.get_tokenizer()


def test_the_constructor_loads_nothing_and_init_is_required(tmp_path):
    trainer = Trainer(1, str(tmp_path / "does-not-exist"))
    with pytest.raises(EngineError, match=r"call trainer\.init\(\) first"):
        trainer.train([row([1], [2])], lambda pack, logprobs: logprobs.sum())
    with pytest.raises(UsageError, match="does not exist"):
        trainer.init()
    trainer.close()


def test_a_second_init_is_refused_because_it_would_drop_the_weights(shared):
    with pytest.raises(EngineError, match="already initialized"):
        shared.init()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"runtime": {"atn_backend": "native"}}, "runtime has no key atn_backend; use only the keys .*attn_backend"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer has no key learning_rate; known keys: .*lr"),
        ({"runtime": {"dtype": "float8"}}, "--dtype float8 is unknown; use one of auto, float32, bfloat16"),
        ({"tp_size": 2}, "world_size=1 is not divisible by tp_size=2"),
    ],
)
def test_a_wrong_configuration_is_a_usage_error(tmp_path, config, message):
    with pytest.raises(UsageError, match=message):
        Trainer(1, str(tmp_path), custom_config=ArenoConfig(**config))


def test_a_configuration_of_the_wrong_class_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="backend areno requires its typed configuration ArenoConfig, got dict"):
        Trainer(1, str(tmp_path), custom_config={"tp_size": 1})


def test_a_registered_backend_is_chosen_by_name(tmp_path):
    own = BackendType("echo-of-test", dict, "builtins:dict")
    assert areno.register_backend(own) is own
    assert areno.register_backend(own) is own
    assert get_backend("Echo-Of-Test") is own
    assert get_backend("areno") is areno.Areno
    with pytest.raises(ValueError, match=r"already registered \(builtins:dict\)"):
        areno.register_backend(BackendType("echo-of-test", dict, "builtins:list"))
    with pytest.raises(ValueError, match=r"there is no backend 'cloud'; use one of areno"):
        Trainer(1, str(tmp_path), backend_type="cloud")
    with pytest.raises(TypeError, match="requires its typed configuration dict, got NoneType"):
        Trainer(1, str(tmp_path), backend_type="echo-of-test")


def test_dummy_loading_needs_no_weights(tmp_path, tiny_checkpoint):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    with open_trainer(tmp_path, dummy_load=True) as trainer, session(trainer):
        assert len(trainer.rollout_token_batch([[5, 6]], 2, SAMPLING)[0].sequences) == 2
