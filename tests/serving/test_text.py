"""Visible text, stop strings and token texts, compared with decoding all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno.serving.token_text import SampleText, StopStringFilter, TokenTexts
from areno.types import GeneratedToken
from tests.support.tiny import TEXTS, bpe_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer([*TEXTS, "Grüße aus Köln – 東京 🙂"] * 3, 600)


def token(number, finish=None):
    return GeneratedToken(number, -1.0, [], 0, finish)


def cut(text, stop):
    """Text up to the stop string that is completed first; of several, the one that starts first."""
    for end in range(1, len(text) + 1):
        hits = [text[:end].find(one) for one in stop if one in text[:end]]
        if hits:
            return text[: min(hits)]
    return text


letters = st.text("abc", max_size=30)


@given(st.lists(letters, max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_text_is_cut_at_stop_strings_however_it_arrives(pieces, stop):
    stream, whole = StopStringFilter(stop), "".join(pieces)
    shown = ""
    for piece in pieces:
        shown += stream.push(piece)
        assert not any(one in shown for one in stop)
    shown += stream.flush()
    # A later piece may complete a stop string that began earlier than one in an earlier piece, never the reverse.
    assert whole.startswith(shown)
    assert not any(one in shown for one in stop)
    if not any(one in whole for one in stop):
        assert shown == whole
    if all(len(piece) <= 1 for piece in pieces):
        assert shown == cut(whole, stop)


def test_text_matches_the_tokenizer_with_and_without_special_tokens(tokenizer):
    ids = tokenizer("Grüße 東京 🙂 is 12.")["input_ids"]
    ids = [*ids[:4], tokenizer.convert_tokens_to_ids("<|user|>"), *ids[4:]]
    for skip in (True, False):
        text = SampleText(tokenizer, (), frozenset({tokenizer.eos_token_id}), skip)
        shown, offsets = text.push([*map(token, ids), token(tokenizer.eos_token_id, "stop")])
        assert shown == tokenizer.decode(ids, skip_special_tokens=skip)
        assert offsets[-1] == len(shown)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("aü東🙂 <|user>", max_size=20), st.randoms(use_true_random=False))
def test_tokens_may_arrive_one_by_one_or_many_at_once(tokenizer, sentence, random):
    ids = [*map(token, tokenizer(sentence)["input_ids"]), token(tokenizer.eos_token_id, "stop")]
    results = []
    for most in (1, len(ids)):
        text, shown, offsets, rest = SampleText(tokenizer, (), frozenset({ids[-1].token}), True), "", [], list(ids)
        while rest:
            size = random.randint(1, most)
            new, places = text.push(rest[:size])
            shown, offsets, rest = shown + new, offsets + places, rest[size:]
        results.append((shown, offsets))
    assert results[0] == results[1]
    assert results[0][0] == sentence.replace("<|user|>", "")


def test_an_incomplete_character_is_emitted_at_the_end(tokenizer):
    ids = tokenizer("🙂")["input_ids"]
    text = SampleText(tokenizer, (), frozenset(), True)
    shown = [text.push([token(number)])[0] for number in ids[:-2]] + [text.push([token(ids[-2], "length")])[0]]
    assert "".join(shown) == tokenizer.decode(ids[:-1])


def test_held_back_text_is_emitted_at_the_end(tokenizer):
    ids = tokenizer("12 plus")["input_ids"]
    text = SampleText(tokenizer, ["plus 3"], frozenset(), True)
    shown, _ = text.push([token(number) for number in ids[:-1]])
    assert shown.strip() == "12"
    assert text.push([token(ids[-1], "length")])[0].strip() == "plus"


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    texts, sentence = TokenTexts(tokenizer), "Grüße aus 東京 🙂🚀, 12 plus 3!"
    ids = tokenizer(sentence)["input_ids"]
    assert b"".join(bytes(texts(number)[1]) for number in ids).decode() == sentence
    names = [texts.name(number) for number in ids]
    assert any(name.startswith("bytes:\\x") for name in names)
    assert " plus" in names
    assert texts.name(tokenizer.eos_token_id) == "<|end|>"
