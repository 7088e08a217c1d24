"""``/v1/completions`` and sampling, with the real openai client and a real server, compared with transformers."""

from __future__ import annotations

import math

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "What is 3 plus 4?"


def complete(server, **body):
    return server.client().completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0, **body})


def streamed(server, **body):
    """Chunks of a stream."""
    return list(complete(server, stream=True, **body))


def joined(chunks, index=0):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def finish_of(chunks, index=0):
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.index == index and c.finish_reason]
    assert len(reasons) == 1
    return reasons[0]


def test_greedy_text_matches_transformers(server, reference):
    prompt = reference.tokenizer(PROMPT)["input_ids"]
    expected = reference.greedy(prompt, 40)
    whole = complete(server, max_tokens=40, extra_body={"return_token_ids": True})
    choice = whole.choices[0]
    assert choice.token_ids == expected
    assert choice.prompt_token_ids == prompt
    assert choice.text == reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        *(len(prompt), 40),
        len(prompt) + 40,
    )


def test_a_stream_has_the_content_of_the_complete_answer(server):
    # On a busy machine, a chunk has several tokens.
    whole = complete(server, max_tokens=90, extra_body={"return_token_ids": True})
    chunks = streamed(
        server, max_tokens=90, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    assert joined(chunks) == whole.choices[0].text
    assert finish_of(chunks) == "length"
    ids = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]
    assert ids == whole.choices[0].token_ids
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 10


def test_logprobs_match_transformers(server, reference):
    prompt = reference.tokenizer(PROMPT)["input_ids"]
    choice = complete(server, max_tokens=12, logprobs=3, extra_body={"return_token_ids": True}).choices[0]
    expected = reference.logprobs(prompt, choice.token_ids)
    taken = expected[torch.arange(12), choice.token_ids]
    assert choice.logprobs.token_logprobs == pytest.approx(taken.tolist(), abs=1e-4)
    for place, tops in enumerate(choice.logprobs.top_logprobs):
        best = expected[place].topk(3).values.tolist()
        assert sorted(tops.values(), reverse=True) == pytest.approx(best, abs=1e-4)
    assert choice.logprobs.text_offset[0] == 0
    offsets = choice.logprobs.text_offset
    for place, (name, start) in enumerate(zip(choice.logprobs.tokens, offsets, strict=True)):
        if not name.startswith("bytes:") and (place == 0 or not choice.logprobs.tokens[place - 1].startswith("bytes:")):
            assert choice.text[start : start + len(name)] == name


def test_a_stop_string_across_tokens_ends_the_text_before_it(server):
    text = complete(server, max_tokens=60).choices[0].text
    # Three characters in the middle of the text: with the tiny vocabulary, most of them are spread across tokens.
    stop = next(text[i : i + 3] for i in range(10, len(text) - 3) if text.find(text[i : i + 3]) == i)
    chunks = streamed(server, max_tokens=60, stop=["never ever", stop])
    assert joined(chunks) == text[: text.find(stop)]
    assert finish_of(chunks) == "stop"
    whole = complete(server, max_tokens=60, stop=stop)
    assert whole.choices[0].text == text[: text.find(stop)]
    assert whole.usage.completion_tokens < 60


def test_text_that_is_only_the_start_of_a_stop_string_is_not_lost(server):
    text = complete(server, max_tokens=20).choices[0].text
    chunks = streamed(server, max_tokens=20, stop=text[-2:] + "\x00\x01 not there")
    assert joined(chunks) == text


def test_stop_token_ids_end_an_answer_and_are_not_shown(server):
    ids = complete(server, max_tokens=30, extra_body={"return_token_ids": True}).choices[0].token_ids
    last = next(i for i in range(3, 30) if ids.index(ids[i]) == i)
    choice = complete(
        server, max_tokens=30, extra_body={"stop_token_ids": [ids[last]], "return_token_ids": True}
    ).choices[0]
    assert choice.token_ids == ids[: last + 1]
    assert choice.finish_reason == "stop"
    before = complete(server, max_tokens=last).choices[0].text
    assert choice.text.startswith(before.rstrip("\ufffd"))
    assert len(choice.text) <= len(before) + 3


def test_samples_differ_and_a_seed_reproduces_all_of_them(server):
    def texts(seed):
        answer = complete(server, n=4, temperature=1.0, max_tokens=16, seed=seed)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.completion_tokens >= 4
        return [choice.text for choice in answer.choices]

    assert len(set(texts(7))) > 1
    assert texts(7) == texts(7)
    assert texts(7) != texts(8)
    assert texts(None) != texts(None)
    chunks = streamed(server, n=4, temperature=1.0, max_tokens=16, seed=7)
    assert [joined(chunks, index) for index in range(4)] == texts(7)


def test_logit_bias_forces_and_forbids_tokens(server, reference):
    token = reference.tokenizer("7")["input_ids"][0]
    forced = complete(server, max_tokens=5, logit_bias={str(token): 100}, extra_body={"return_token_ids": True})
    assert forced.choices[0].token_ids == [token] * 5
    usual = complete(server, max_tokens=1, extra_body={"return_token_ids": True}).choices[0].token_ids[0]
    other = complete(server, max_tokens=1, logit_bias={str(usual): -100}, extra_body={"return_token_ids": True})
    assert other.choices[0].token_ids[0] != usual


def test_penalties_reduce_repetition(server):
    # With large penalties, a random model repeats no token while the scores of others are close.
    extra = {"return_token_ids": True, "ignore_eos": True}
    plain = complete(server, max_tokens=60, extra_body=extra).choices[0].token_ids
    varied = complete(server, max_tokens=60, frequency_penalty=2, presence_penalty=2, extra_body=extra)
    assert len(set(varied.choices[0].token_ids)) > len(set(plain))


def test_extreme_sampling_settings_are_greedy(server):
    greedy = complete(server, max_tokens=12).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(server, max_tokens=12, temperature=1.0, extra_body=extra).choices[0].text == greedy
    assert complete(server, max_tokens=12, temperature=1.0, top_p=0).choices[0].text == greedy
    assert complete(server, max_tokens=12, temperature=1e-30).choices[0].text == greedy


def test_text_and_token_prompts_give_the_same_answers(server, reference):
    other = "The answer is"
    ids = [reference.tokenizer(text)["input_ids"] for text in (PROMPT, other)]
    alone = [complete(server, prompt=text, max_tokens=8).choices[0].text for text in (PROMPT, other)]
    for prompts in ([PROMPT, other], ids):
        answer = complete(server, prompt=prompts, max_tokens=8, n=2)
        assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 32
    assert complete(server, prompt=ids[0], max_tokens=8).choices[0].text == alone[0]


def test_echo_repeats_the_prompt(server, reference):
    plain = complete(server, max_tokens=4).choices[0].text
    assert complete(server, max_tokens=4, echo=True).choices[0].text == PROMPT + plain
    ids = reference.tokenizer(PROMPT)["input_ids"]
    assert joined(streamed(server, prompt=ids, max_tokens=4, echo=True)) == PROMPT + plain


def test_an_answer_is_cut_where_the_context_ends(server, reference):
    prompt = (reference.tokenizer(PROMPT)["input_ids"] * 1000)[:4090]
    answer = complete(server, prompt=prompt, max_tokens=50, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 4096 - 4090
    assert answer.choices[0].finish_reason == "length"


def test_every_metric_is_listed_once(server):
    families = [f.name for f in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)]
    assert len(families) == len(set(families))
    assert {"areno_reused_tokens", "areno_drafted_tokens", "areno_agreed_tokens", "areno_replayed_steps"} <= set(
        families
    )


def test_token_times_are_in_the_metrics(server):
    before = server.metric("areno_time_to_first_token_seconds_count")
    between = server.metric("areno_time_per_output_token_seconds_count")
    complete(server, max_tokens=9, n=2, extra_body={"ignore_eos": True})
    assert server.metric("areno_time_to_first_token_seconds_count") == before + 2
    assert server.metric("areno_time_per_output_token_seconds_count") == between + 16
    assert server.metric("areno_generated_tokens_total") >= 18
    assert server.metric("areno_kv_tokens") == 40000
    assert math.isfinite(server.metric("areno_kv_tokens_used"))
