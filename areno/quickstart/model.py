"""The random model that the quickstart begins with: 0.27 M parameters and a tokenizer of its own, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areno.quickstart.task import WORDINGS, worked_answer

_SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """Byte-level BPE, so that any text encodes; its merges are the task's words, and every digit is a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = [wording.format(a=347, b=182) for wording in WORDINGS] + [worked_answer(347, 182)]
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\d| ?[A-Za-z]+ ?| ?[^\sA-Za-z\d]+ ?|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_CHAT_TEMPLATE
    )


def make_checkpoint(folder: Path, seed: int) -> int:
    """Write a random model and its tokenizer; returns the number of parameters.

    Wide initial weights, many small heads and a small rotary base make so small a model learn to copy and add about
    three times sooner than the usual settings.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=256,
        max_position_embeddings=256,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
