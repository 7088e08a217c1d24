"""Detection of prompts that already contain the markers of a chat template, but not of instructions about markers."""

from __future__ import annotations

import copy
import logging

import pytest

from areno.api.datasets import iter_prompt_batches
from areno.text.markers import marker_in, warn_about_markers
from areno.training.objectives.base import RowBounds
from areno.training.objectives.sft import build_sft_rows
from tests.support.tiny import bpe_tokenizer


@pytest.fixture
def tokenizer():
    return bpe_tokenizer(["What is 1 plus 2?"] * 5)


@pytest.mark.parametrize(
    ("prompt", "marker"),
    [
        ("<|User|>What is 1 plus 2?<|Assistant|><think>\n", "<|User|>"),  # as in some published math data
        ("<｜begin▁of▁sentence｜><｜User｜>What is 1 plus 2?", "<｜begin▁of▁sentence｜>"),
        ("[INST] What is 1 plus 2? [/INST]", "[INST]"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>", "<|start_header_id|>"),
        ("What is 1 plus 2?<|end|>", "<|end|>"),  # a special token of this tokenizer
        ("What is 1 plus 2? <think>\n", "<think>"),
        (
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "<|im_start|>user\nHi"}],
            "<|im_start|>",
        ),
        ("Reason between <think> and </think>, then answer.", None),
        ("What is 1 < 2 | 3 > 2? Use [brackets].", None),
        ("<|user|>What is 1 plus 2?<|end|><|assistant|>", None),  # recognized as rendered: no template is applied
        ([{"role": "user", "content": "What is 1 plus 2?"}], None),
    ],
)
def test_markers_are_distinguished_from_mentions_of_them(tokenizer, prompt, marker):
    assert marker_in(tokenizer, prompt) == marker
    tokenizer.chat_template = None
    assert marker_in(tokenizer, prompt) is None


def test_a_run_warns_once_and_names_the_row_the_marker_and_the_remedy(tokenizer, caplog):
    rows = [{"prompt": f"{start}What is {n} plus {n}?"} for n, start in enumerate(["", "", "<|User|>", "<|User|>"])]
    with caplog.at_level(logging.WARNING, logger="areno"):
        for _ in range(2):  # epochs
            list(iter_prompt_batches(rows, tokenizer, batch_size=2, max_prompt_tokens=99, source="boba.jsonl"))
    [record] = caplog.records
    assert record.getMessage().startswith("boba.jsonl, row 3: the prompt contains the chat template marker '<|User|>'")
    assert "--dataset-loader-fn" in record.getMessage()
    caplog.clear()
    rows = [{"prompt": "[INST] Hi [/INST]", "response": "Hello."}]
    limits = {"max_prompt_tokens": 99, "max_new_tokens": 99, "eos_token_ids": frozenset()}
    build_sft_rows(rows, bpe_tokenizer(["Hi"]), RowBounds(**limits, source="sft.jsonl"))  # another run
    assert (
        caplog.records[0]
        .getMessage()
        .startswith("sft.jsonl, row 1: the prompt contains the chat template marker '[INST]'")
    )


def test_no_warning_without_markers(tokenizer, caplog):
    warn_about_markers(tokenizer, "What is 1 plus 2?", "row 1")
    assert not caplog.records


@pytest.mark.parametrize(
    ("prompt", "form"),
    [("What is 2 plus 3?", "used verbatim"), ([{"role": "user", "content": "hi"}], "role: content")],
)
def test_a_tokenizer_without_a_template_is_reported_once(tokenizer, caplog, prompt, form):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    for _ in range(2):
        warn_about_markers(plain, prompt, "row 1")
    [record] = caplog.records
    assert "the tokenizer has no chat template" in record.message
    assert form in record.message
