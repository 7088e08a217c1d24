"""Methods of the sections."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from areno.config.experiment import GenerationHyperparameters
from areno.errors import UsageError


def test_stop_tokens_of_a_tokenizer_are_added_once():
    config = GenerationHyperparameters(stop_token_ids=[7])
    tokenizer = SimpleNamespace(eos_token_id=7, pad_token_id=9)
    assert config.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == [7, 9]
    assert config.stop_token_ids == [7]
    tokenizer = SimpleNamespace(eos_token_id=5, pad_token_id=None)
    assert config.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == [7, 5]


@pytest.mark.parametrize(
    ("api_format", "expected"),
    [
        (
            "completions",
            {
                "n": 2,
                "max_completion_tokens": 8,
                "temperature": 0.5,
                "top_p": 1.0,
                "stop": ["x"],
                "frequency_penalty": 0.0,
            },
        ),
        ("responses", {"max_output_tokens": 8, "temperature": 0.5, "top_p": 1.0}),
        ("openai-agents", {"max_tokens": 8, "temperature": 0.5, "top_p": 1.0, "frequency_penalty": 0.0}),
    ],
)
def test_arguments_of_an_openai_client(api_format, expected):
    config = GenerationHyperparameters(n_samples=2, max_new_tokens=8, temperature=0.5, stop=["x"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert config.to_openai_args_dict(api_format=api_format) == expected
    lost = " ".join(str(one.message) for one in caught)
    assert ("n_samples" in lost) == (api_format != "completions")


def test_arguments_can_be_left_out_and_greedy_is_temperature_zero():
    config = GenerationHyperparameters(greedy=True, stop=None)
    arguments = config.to_openai_args_dict(exclude_args=["n_samples", "top_p"])
    assert arguments["temperature"] == 0.0
    assert "n" not in arguments
    assert "top_p" not in arguments
    assert "stop" not in arguments


def test_settings_that_openai_lacks_cause_a_warning():
    with pytest.warns(UserWarning, match="support top_k, min_new_tokens|support min_new_tokens, top_k"):
        GenerationHyperparameters(top_k=5, min_new_tokens=2).to_openai_args_dict()
    with pytest.raises(UsageError, match="choose completions, responses, openai-agents"):
        GenerationHyperparameters().to_openai_args_dict(api_format="chat")
