"""Tiny real models and tokenizers that tests build on the fly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_5",
    "granite",
    "gpt2",
    "phi3",
)
VOCAB = 97


def tiny_config(
    family: str, vocab: int = VOCAB, hidden: int = 64, layers: int = 4, heads: int = 4, **extra: Any
) -> Any:
    window = 8
    base: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "intermediate_size": 2 * hidden,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": None,
        **extra,
    }
    mixed = (["sliding_attention", "full_attention"] * layers)[:layers]
    if family == "qwen3_5":
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        heads_of = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        return Qwen3_5TextConfig(**base, **heads_of, linear_key_head_dim=16, linear_value_head_dim=16)
    if family == "gpt2":
        return tf.GPT2Config(
            vocab_size=vocab,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            bos_token_id=0,
            eos_token_id=base["eos_token_id"],
            n_positions=extra.get("n_positions", 1024),
        )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    makers = {
        "llama": lambda: tf.LlamaConfig(**base),
        "qwen2": lambda: tf.Qwen2Config(
            **base, use_sliding_window=True, sliding_window=window, max_window_layers=layers // 2
        ),
        "qwen3": lambda: tf.Qwen3Config(**base),
        "mistral": lambda: tf.MistralConfig(**base, sliding_window=window),
        "gemma2": lambda: tf.Gemma2Config(
            **base, sliding_window=window, layer_types=mixed, attn_logit_softcapping=20.0
        ),
        "gemma3": lambda: tf.Gemma3TextConfig(**base, sliding_window=window, layer_types=mixed),
        "gpt_oss": lambda: tf.GptOssConfig(
            **base, sliding_window=window, layer_types=mixed, num_local_experts=4, num_experts_per_tok=2
        ),
        "granite": lambda: tf.GraniteConfig(**base, logits_scaling=3.0),
        "granitemoe": lambda: tf.GraniteMoeConfig(**base, num_local_experts=4, num_experts_per_tok=2),
        "phi3": lambda: tf.Phi3Config(**base),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**base, **experts),
        "bloom": lambda: tf.BloomConfig(vocab_size=vocab, hidden_size=hidden, n_layer=layers, n_head=heads),
        "mamba": lambda: tf.MambaConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=2),
    }
    return makers[family]()


def tiny_module(family: str, seed: int = 0, sharpen: float = 3.0, **config: Any) -> torch.nn.Module:
    """A random model in fp32 with stock eager attention; ``sharpen`` makes its distribution less flat."""
    torch.manual_seed(seed)
    module = tf.AutoModelForCausalLM.from_config(tiny_config(family, **config), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 0.7)
            elif parameter.ndim > 1:
                parameter.mul_(sharpen)
    return module


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def bpe_tokenizer(texts: list[str], vocab: int = 512) -> Any:
    """A byte-level BPE tokenizer trained on texts, with a chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TEXTS = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(30) for b in range(30)]


def save_tiny_checkpoint(
    folder: Path, family: str = "llama", texts: list[str] | None = None, vocab: int = 512, **config: Any
) -> Path:
    """Write a random model with its tokenizer; returns the folder."""
    tokenizer = bpe_tokenizer(texts or TEXTS, vocab)
    module = tiny_module(
        family,
        vocab=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        **{"sharpen": 1.0, "hidden": 32, "layers": 2, "heads": 2, **config},
    )
    module.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    module.generation_config.pad_token_id = tokenizer.pad_token_id  # type: ignore[union-attr]
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder
