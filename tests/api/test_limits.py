"""Context limits: generation is truncated, long data rows are skipped, and the SDK refuses the rest."""

from __future__ import annotations

import json
import re

import pytest
import transformers as tf

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer, TrainSequence
from areno.api.datasets import iter_prompt_batches
from areno.engine.limits import check_tokenizer, context_length
from areno.errors import DataError, EngineError, UsageError
from areno.training.objectives.base import RowBounds
from areno.training.objectives.pairs import build_preference_rows
from areno.training.objectives.sft import build_sft_rows
from areno.types import Request
from tests.support.loops import open_loop, step
from tests.support.tiny import bpe_tokenizer, save_tiny_checkpoint, tiny_module

CONTEXT = 32


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A checkpoint with learned positions, which limit its context."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("short") / "gpt2", "gpt2", n_positions=CONTEXT)


@pytest.fixture(scope="module")
def trainer(short):
    with Trainer(1, str(short), custom_config=ArenoConfig(optimizer={"lr": 1e-3})) as trainer:
        trainer.init()
        yield trainer


def session(trainer, sampling):
    return trainer.rollout_session(sampling_params=sampling, proxy=False)


def row(tokens):
    return TrainSequence([True] + [False] * (len(tokens) - 1), tokens)


# -- the length of a context -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tf.GPT2Config(n_positions=64), 64),
        (tf.LlamaConfig(max_position_embeddings=256), 256),
        (tf.MambaConfig(), None),
        (tf.Gemma3Config(text_config={"max_position_embeddings": 512}), 512),
        # Llama 3.1: the stated length is the extended one.
        (
            tf.LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            ),
            131072,
        ),
        # Qwen2.5 with YaRN as its model card writes it: the stated length is the original one.
        (
            tf.Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            ),
            131072,
        ),
        # gpt-oss: YaRN, and the stated length is already the extended one.
        (tf.GptOssConfig(), 131072),
        (tf.LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "factor": 4.0}), 16384),
        (tf.LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "dynamic", "factor": 4.0}), 4096),
    ],
)
def test_the_context_length_follows_the_models_configuration(config, expected):
    assert context_length(config) == expected


# -- generation --------------------------------------------------------------------------------------------------------


def test_generation_stops_at_the_context_limit(trainer):
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    with session(trainer, sampling):
        results = trainer.rollout_token_batch([list(range(5, 15)), [7]], 2, sampling)
    assert [[len(s.resp_tokens) for s in result.sequences] for result in results] == [[22, 22], [31, 31]]
    assert {s.finish_reason for result in results for s in result.sequences} == {"length"}


def test_the_smaller_of_the_callers_and_the_models_context_applies(trainer):
    for limit, length in ((20, 10), (1000, 22)):
        sampling = SamplingParams(max_new_tokens=100, min_new_tokens=30, ignore_eos=True, max_context_len=limit)
        with session(trainer, sampling):
            [result] = trainer.rollout_token_batch([list(range(5, 15))], 1, sampling)
        assert len(result.sequences[0].resp_tokens) == length


def test_a_prompt_that_fills_the_context_is_refused_with_its_index(trainer):
    sampling = SamplingParams(max_new_tokens=4)
    with session(trainer, sampling):
        with pytest.raises(UsageError, match=r"prompt 1 has 32 tokens.* in a context of 32"):
            trainer.rollout_token_batch([[5], [5] * CONTEXT], 1, sampling)
        with pytest.raises(UsageError, match=r"prompt 0 has 9 tokens.* in a context of 9"):
            trainer.rollout_token_batch([[5] * 9], 1, SamplingParams(max_new_tokens=4, max_context_len=9))


def test_the_engine_refuses_requests_that_would_end_generation_for_all(trainer):
    """Requests of servers and experiments bypass the trainer and its checks."""
    few, engine = SamplingParams(max_new_tokens=2), trainer.backend
    vocabulary = engine.vocab_size
    for request, message in (
        (Request([5] * CONTEXT, few), "32 tokens leaves no room"),
        (Request([5, vocabulary], few), f"a prompt contains token id {vocabulary}, but the ids of this model are 0 to"),
        (Request([5, -1], few), "a prompt contains token id -1"),
        (Request([5], few, seeds=[]), "a request has no seeds; pass at least one seed"),
        (Request([], few), "at least one token"),
        (Request([5], SamplingParams(logit_bias={vocabulary: 1.0})), f"logit_bias contains token id {vocabulary}"),
    ):
        with pytest.raises(EngineError, match=re.escape(message)):
            engine.submit([Request([5], few), request])
    [good] = engine.submit([Request([5], few)])
    assert len(good.result(timeout=60).sequences) == 1


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_beyond_the_context_are_neither_scored_nor_trained_on(trainer):
    long, message = [5] * (CONTEXT + 1), r"row 1 has 33 tokens, but the context length of role 'actor' is 32"
    with pytest.raises(UsageError, match=message):
        trainer.score_logprobs("actor", [[5], long])
    with pytest.raises(UsageError, match=message):
        trainer.train([row([5, 6]), row(long)], lambda pack, logprobs: logprobs.sum())
    assert len(trainer.score_logprobs("actor", [[5] * CONTEXT])[0]) == CONTEXT
    unknown = trainer.backend.vocab_size
    with pytest.raises(UsageError, match=f"row 0 contains token id {unknown}, but the ids of role 'actor' are 0 to"):
        trainer.score_logprobs("actor", [[5, unknown]])


def test_errors_name_the_role_with_the_shorter_context(tmp_path):
    long = save_tiny_checkpoint(tmp_path / "long")
    critic = save_tiny_checkpoint(tmp_path / "short", max_position_embeddings=16)
    with Trainer(1, str(long)) as trainer:
        trainer.init()
        trainer.ensure_roles({"critic": ModelRole("critic", str(critic), trainable=True)})
        with pytest.raises(UsageError, match=r"the context length of role 'critic' is 16; .*--max-context-len 16"):
            trainer.score_values("critic", [[5] * 17])


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(["What is 1 plus 2? The answer is 3."] * 20)


def test_supervised_rows_beyond_the_context_are_skipped_and_counted(tokenizer):
    data = [{"prompt": "What is 1 plus 2?", "response": "The answer is 3. " * n} for n in (1, 9, 1)]
    limits = {"max_prompt_tokens": 1000, "max_new_tokens": 1000, "eos_token_ids": frozenset([tokenizer.eos_token_id])}
    everything, none = build_sft_rows(data, tokenizer, RowBounds(**limits))
    lengths = [len(r.tokens) for r in everything]
    rows, left_out = build_sft_rows(data, tokenizer, RowBounds(**limits, context_limit=lengths[0]))
    assert (none, left_out, [len(r.tokens) for r in rows]) == (0, 1, [lengths[0], lengths[2]])
    with pytest.raises(DataError, match=r"none of 3 rows .* in a context of 4 tokens"):
        build_sft_rows(data, tokenizer, RowBounds(**limits, context_limit=4))


def test_pairs_beyond_the_context_are_skipped_and_counted(tokenizer):
    data = [{"prompt": "What is 1 plus 2?", "chosen": "3", "rejected": "4" * n} for n in (1, 90)]
    limits = {"max_prompt_tokens": 1000, "max_new_tokens": 1000, "eos_token_ids": frozenset([tokenizer.eos_token_id])}
    assert len(build_preference_rows(data, tokenizer, RowBounds(**limits))[0]) == 2
    pairs, dropped = build_preference_rows(data, tokenizer, RowBounds(**limits, context_limit=60))
    assert (len(pairs), dropped) == (1, 1)


def test_prompts_that_leave_no_room_for_an_answer_are_skipped_and_counted(tokenizer):
    data = [{"prompt": "What is 1 plus 2? " * n} for n in (1, 20, 1)]
    [batch] = iter_prompt_batches(data, tokenizer, batch_size=8, max_prompt_tokens=1000, context_limit=60)
    assert (len(batch.items), batch.skipped_long) == (2, 1)
    with pytest.raises(
        UsageError, match=r"3 tokens \(longer prompts leave no room for an answer in a context of 4 tokens"
    ):
        list(iter_prompt_batches(data, tokenizer, batch_size=8, max_prompt_tokens=1000, context_limit=4))


# -- whole steps -------------------------------------------------------------------------------------------------------


def test_a_training_step_stays_within_the_context(short, tmp_path, caplog):
    """Prompts that leave no room for an answer are skipped; other answers end at the context limit."""
    rows = [{"prompt": "What is 3 plus 4? " * (1 + 9 * (n % 2))} for n in range(8)]
    with open_loop("gspo", short, tmp_path, rows=rows, max_new_tokens=100, ignore_eos=True) as loop:
        with caplog.at_level("INFO", logger="areno"):
            outcome = step(loop)
        assert loop.evaluate(rows)["skipped_long"] == 4
    assert outcome.skipped_long == 4
    assert {len(row.tokens) for row in outcome.rows} == {CONTEXT}
    assert outcome.stats["truncated_ratio"] == 1.0
    assert "skipped 4 prompts longer than 31 tokens (longer prompts leave no room for an answer" in caplog.text


def test_max_context_len_also_limits_prompt_rollouts(tiny_checkpoint, tmp_path):
    with open_loop("grpo", tiny_checkpoint, tmp_path, max_new_tokens=50, max_context_len=24, ignore_eos=True) as loop:
        assert {len(row.tokens) for row in step(loop).rows} == {24}


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def checked(folder):
    return check_tokenizer(tf.AutoTokenizer.from_pretrained(folder), str(folder), option="--ckpt")


def with_vocabulary(folder, vocabulary, **more):
    tokenizer = bpe_tokenizer(["What is 1 plus 2?"] * 20)
    module = tiny_module("llama", vocab=len(tokenizer) + vocabulary, hidden=32, layers=1, heads=2, **more)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_at_load(tmp_path):
    size = with_vocabulary(tmp_path, -3)
    message = (
        r"has 3 token ids for which the model has no embedding: "
        rf"token .* has id {size - 3}, but the embedding table has {size - 3} rows"
    )
    with pytest.raises(UsageError, match=message):
        checked(tmp_path)
    trainer = Trainer(1, str(tmp_path))
    with pytest.raises(UsageError, match=message):
        trainer.init()
    trainer.close()


@pytest.mark.parametrize("more", [0, 27])
def test_a_model_may_have_spare_embedding_rows(tmp_path, more):
    with_vocabulary(tmp_path, more)
    assert checked(tmp_path) == 4096


def test_unused_special_tokens_may_exceed_the_embedding_table(tmp_path):
    """Llama 2 checkpoints with a padding token that only the tokenizer has are common."""
    with_vocabulary(tmp_path, 0)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(tmp_path)
    assert checked(tmp_path) == 4096
    tokenizer.chat_template = "<|turn|>" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"1 token ids for which the model has no embedding: token '<\|turn\|>'"):
        checked(tmp_path)


def test_the_check_reads_no_weights(tmp_path):
    with_vocabulary(tmp_path, 0)
    (tmp_path / "model.safetensors").unlink()
    assert checked(tmp_path) == 4096
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 99}))
    assert checked(tmp_path) == 99
