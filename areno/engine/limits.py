"""Read a model's context length and vocabulary size from its configuration, and check requests and tokenizers.

A token id beyond the vocabulary would index the embedding table out of bounds, which crashes the process on a GPU. If a model
has a table of position embeddings, a row longer than the context length would index this table out of bounds. With rotary
embeddings, which have no table, the model would silently run at positions on which the model was never trained.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from areno.config.paths import base_of, tokenizer_of
from areno.errors import EngineError, UsageError, first_line
from areno.types import Request, tightest

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    SafetensorError,
    UnpicklingError,
)
"""Exceptions that are raised when the files of a checkpoint are missing, damaged or unsuitable."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
# Rotary scaling types whose configuration states the length before scaling.
_SCALED = ("yarn", "llama3", "longrope")


def context_length(config: Any) -> int | None:
    """Return the maximum number of tokens per sequence; None if the ``transformers`` configuration states no limit.

    Most configurations with scaled rotary embeddings state the length after scaling. Other configurations (YaRN in Qwen models,
    linear scaling) state the length before scaling. For these configurations, the stated length is multiplied by the scaling
    factor.
    """
    text = config.get_text_config()
    stated = next((int(value) for name in _POSITIONS if (value := getattr(text, name, None))), None)
    rope = getattr(text, "rope_parameters", None) or {}
    factor, kind = rope.get("factor"), rope.get("rope_type")  # None if nested by layer type
    if stated is None or not factor:
        return stated
    if kind == "linear":
        return int(stated * factor)
    original = rope.get("original_max_position_embeddings") if kind in _SCALED else None
    # transformers defaults the original length to the stated one, which llama3 and longrope have already extended.
    if not original or (original == stated and kind != "yarn"):
        return stated
    return max(stated, int(original * factor))


def vocabulary_size(config: Any) -> int:
    """Return the number of rows of the embedding table."""
    return int(config.get_text_config().vocab_size)


def read_config(path: str, *, option: str, trust_remote_code: bool = False) -> Any:
    """Read the ``transformers`` configuration of a checkpoint, or of an adapter's base model.

    Error messages contain ``option``, the name of the option that sets ``path`` (such as ``--ckpt``).

    Raises UsageError: the configuration is unreadable.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    # The last four are raised for values of a wrong type, or out of bounds.
    invalid = (OSError, ValueError, LookupError, StrictDataclassError, TypeError, AttributeError, ArithmeticError)
    try:
        config = AutoConfig.from_pretrained(base_of(path), trust_remote_code=trust_remote_code)
        names, text = config.architectures, config.get_text_config()
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(
                f"config.json: architectures is {names!r}, but must be a list of class names; correct or remove this entry"
            )
        if not isinstance(text, PretrainedConfig):
            raise ValueError(
                f"config.json: text_config is {text!r}, but must be the configuration of a model; correct or remove this entry"
            )
        return config
    except invalid as error:
        where = "folder" if Path(path).expanduser().exists() else "hub id"
        strict = isinstance(error, StrictDataclassError)  # the second line has the reason
        reason = f"config.json: {' '.join(str(error).split())}" if strict else first_line(error)
        raise UsageError(f"{option} {path}: this {where} could not be loaded: {reason}") from error


def check_tokenizer(tokenizer: Any, path: str, *, option: str, trust_remote_code: bool = False) -> int | None:
    """Check that a checkpoint has an embedding for every token id that the tokenizer produces.

    A special token, such as the padding token, needs no embedding if neither the tokenizer nor the chat template inserts the
    token. The engine rejects a prompt that contains a token without an embedding.

    Args:
        option: name of the option that sets ``path``; it appears in error messages.

    Returns:
        Maximum number of tokens per sequence; None if the model's configuration states no limit.

    Raises:
        UsageError: the configuration is unreadable, or a token id has no embedding.
    """
    config = read_config(path, option=option, trust_remote_code=trust_remote_code)
    rows, template = vocabulary_size(config), str(getattr(tokenizer, "chat_template", None) or "")
    written = {tokenizer.bos_token, tokenizer.eos_token}
    unused = {t for t in tokenizer.all_special_tokens if t not in written and t not in template}
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows and token not in unused}
    if beyond:
        token = min(beyond, key=lambda name: beyond[name])
        raise UsageError(
            f"{option} {path}: the tokenizer has {len(beyond)} token ids for which the model has no embedding: token {token!r} "
            f"has id {beyond[token]}, but the embedding table has {rows} rows (vocab_size in config.json); use the model's own "
            "tokenizer, or resize the embeddings with transformers (resize_token_embeddings) and save the model again"
        )
    return context_length(config)


def check_role_tokenizer(tokenizer: Any, own_path: str, name: str, path: str, trust_remote_code: bool = False) -> None:
    """Check that the model of a role has the actor's vocabulary, because all roles read the same token ids.

    ``tokenizer`` and ``own_path`` are the actor's tokenizer and checkpoint. ``name`` and ``path`` are the role's name and
    checkpoint. Raises UsageError: the vocabularies differ, a token id has no embedding, or the configuration is unreadable.
    """
    from areno.text.chat import load_tokenizer

    if path == own_path:
        return
    mine = theirs = tokenizer.get_vocab()
    with suppress(UsageError):  # without a tokenizer, nothing can be compared
        theirs = load_tokenizer(tokenizer_of(path), trust_remote_code=trust_remote_code).get_vocab()
    if mine != theirs:
        token = next(t for t in {**mine, **theirs} if mine.get(t) != theirs.get(t))
        raise UsageError(
            f"role {name!r}: all roles must have the same token ids, but token {token!r} has the id {theirs.get(token)} in the "
            f"tokenizer of {path} and the id {mine.get(token)} in the actor's tokenizer ({own_path}); None means that the "
            "tokenizer lacks the token; use a model with the actor's tokenizer"
        )
    check_tokenizer(tokenizer, path, option=f"role {name!r}", trust_remote_code=trust_remote_code)


def fitted(requests: Iterable[Request], context: int | None, vocabulary: int, kv_tokens: int) -> list[Request]:
    """Check requests, and limit the new tokens of each request to the context length minus the prompt length.

    Raises EngineError: a request is invalid, or is too long for the context or the KV cache.
    """
    return [_fitted(request, context, vocabulary, kv_tokens) for request in requests]


def _fitted(request: Request, context: int | None, vocabulary: int, kv_tokens: int) -> Request:
    prompt, sampling = len(request.prompt_tokens), request.sampling
    if not prompt:
        raise EngineError("a prompt must contain at least one token")
    if not request.seeds:
        raise EngineError("a request has no seeds; pass at least one seed, because each seed gives one sample")
    for what, ids in (("a prompt", request.prompt_tokens), ("logit_bias", sampling.logit_bias)):
        if (invalid := unknown_id(ids or (), vocabulary)) is not None:
            raise EngineError(
                f"{what} contains token id {invalid}, but the ids of this model are 0 to {vocabulary - 1}"
            )
    most, limit = sampling.max_new_tokens, tightest(context, sampling.max_context_len)
    if limit is not None:
        if prompt >= limit:
            raise EngineError(
                f"a prompt of {prompt} tokens leaves no room for an answer in a context of {limit} tokens; shorten the prompt"
            )
        most = min(most, limit - prompt)
    if prompt + most > kv_tokens:
        raise EngineError(
            f"a request of {prompt} prompt tokens and up to {most} new tokens cannot fit in the KV cache of {kv_tokens} "
            "tokens; raise --kv-cache-tokens or lower --max-new-tokens"
        )
    if most == sampling.max_new_tokens:
        return request
    capped = replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
    return replace(request, sampling=capped)


def unknown_id(ids: Iterable[int], vocabulary: int) -> int | None:
    """Return the first of ``ids`` that has no embedding; None if all ids have embeddings."""
    return next((token for token in ids if not 0 <= token < vocabulary), None)
