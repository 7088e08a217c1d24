"""Write a causal language model as a GGUF file for llama.cpp and for programs based on llama.cpp."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, get_tensor_name_map, quants

from areno.errors import UsageError
from areno.storage.gguf import SOFT_CAPS, rope_factors

_GEMMA = {"gemma2": "gemma2", "gemma3_text": "gemma3"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", **_GEMMA}
"""Maps each supported ``model_type`` to its GGUF architecture."""

# Pre-tokenizer regular expressions, and llama.cpp's names for them.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_SPLIT % "{1,3}": "llama-bpe", _SPLIT % "": "qwen2"}


def write_gguf(module: Any, tokenizer: Any, target: Path, kind: str) -> None:
    """Write a ``transformers`` model as a GGUF file.

    Matrices are stored in the type ``kind`` (f32, f16, bf16 or q8_0), and vectors in f32. A matrix whose row
    length is not a multiple of the q8_0 block size is stored in f16 instead of q8_0.

    Raises UsageError: the GGUF export does not support the model's architecture, rotary embeddings, layers or tokenizer. In
    this case, neither the file nor its folder is created.
    """
    fields = _shape(module.config) | _vocabulary(tokenizer, module.config.vocab_size)
    tensors = list(_tensors(module))
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(target, ARCHITECTURES[module.config.model_type])
    writer.add_name(f"{target.parent.name} {kind}")
    writer.add_file_type(LlamaFileType[("ALL_" if kind == "f32" else "MOSTLY_") + kind.upper()])
    for name, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for name, weight in tensors:
        values = weight.float().numpy()
        stored = GGMLQuantizationType[kind.upper() if values.ndim > 1 else "F32"]
        if values.shape[-1] % quants.GGML_QUANT_SIZES[stored][0]:  # the type needs full blocks
            stored = GGMLQuantizationType.F16
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"--gguf does not support {what}; export without --gguf, and convert the result with llama.cpp's convert_hf_to_gguf.py"
    )


def _shape(config: Any) -> dict[str, Any]:
    if config.model_type not in ARCHITECTURES:
        raise _unsupported(f"models of type {config.model_type} (supported types: {', '.join(ARCHITECTURES)})")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window, gemma = getattr(config, "sliding_window", None), config.model_type in _GEMMA
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] not in ("default", "llama3"):
        raise _unsupported(f"rotary embeddings of type {rope['rope_type']}")
    if gemma:  # llama.cpp assumes these values of the published models
        period = 2 if config.model_type == "gemma2" else 6
        if any((kind == "full_attention") != (i % period == 0) for i, kind in enumerate(config.layer_types, 1)):
            raise _unsupported(f"layers in this order: {', '.join(config.layer_types)}")
        if config.query_pre_attn_scalar != head:
            raise _unsupported(f"query_pre_attn_scalar {config.query_pre_attn_scalar} for heads of size {head}")
    return {
        # Except for Gemma, llama.cpp applies no sliding window, so the context ends where the window would take effect.
        "context_length": min(config.max_position_embeddings, window if window and not gemma else 1 << 30),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head),
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": rope["rope_theta"],
        "rope_freq_base_swa": config.rope_parameters.get("sliding_attention", {}).get("rope_theta"),
        "sliding_window": window if gemma else None,
        **{name: getattr(config, name, None) for name in SOFT_CAPS},
    }


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors with their GGUF names. The tensors follow the layout conventions of llama.cpp."""
    config, arch = module.config, ARCHITECTURES[module.config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, weight in module.state_dict().items():
        # The rotary embedding of llama.cpp pairs adjacent features, not the two halves of a head.
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        elif config.model_type in _GEMMA and name.endswith("norm.weight"):
            weight = weight.float() + 1
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            if (gguf_name := names.get_name(name, (".weight", ".bias"))) is None:
                raise _unsupported(f"the weight {name}, which has no name in llama.cpp")
            yield gguf_name, weight
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", rope_factors(config)


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    description = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model: dict[str, Any] = description.get("model", {})
    if model.get("type") != "BPE":
        raise _unsupported(f"a tokenizer of type {model.get('type', type(tokenizer).__name__)}")
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for token, index in model["vocab"].items():
        if index >= size:
            raise _unsupported(f"the token {token!r}: its id is {index}, but the model has {size} embeddings")
        is_byte = model["byte_fallback"] and len(token) == 6 and token.startswith("<0x")
        tokens[index], kinds[index] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for added in description["added_tokens"]:
        if (index := added["id"]) < size:  # Gemma 3's image token has no embedding in its text-only models
            tokens[index] = added["content"]
            kinds[index] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    first = tokenizer("a")["input_ids"]
    fields: dict[str, Any] = {
        "token_list": tokens,
        "token_types": kinds,
        **{f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "unk", "pad")},
        "add_bos_token": first[:1] == [tokenizer.bos_token_id],
        "chat_template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    }
    if model["byte_fallback"]:  # converted from SentencePiece, with tokens in merge order
        fields |= {"tokenizer_model": "llama", "token_scores": [-float(index) for index in range(size)]}
        fields["add_space_prefix"] = tokenizer.convert_ids_to_tokens(first)[-1].startswith("▁")
    else:
        fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": _splitting(description["pre_tokenizer"] or {})}
        fields["token_merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return fields


def _splitting(steps: dict[str, Any]) -> str:
    """Return llama.cpp's name for a byte-level pre-tokenizer."""
    parts = steps.get("pretokenizers", [steps])
    if any(step.get("type") == "Digits" and step["individual_digits"] for step in parts):
        return "smollm"
    for step in parts:
        if step.get("type") == "Split":
            if (pattern := step["pattern"].get("Regex")) in _SPLITS:
                return _SPLITS[pattern]
            raise _unsupported(f"a pre-tokenizer with the pattern {pattern}")
    return "gpt-2"
