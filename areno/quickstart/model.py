"""Randomly initialized models with their own tokenizer; the quickstart's model has 0.28 M parameters."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areno.quickstart.task import WORDINGS, worked_answer

_SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """Train the tokenizer of the quickstart. Each word of the task and each digit is one token."""
    corpus = [wording.format(a=347, b=182) for wording in WORDINGS] + [worked_answer(347, 182)]
    words = r"\d| ?[A-Za-z]+ ?| ?[^\sA-Za-z\d]+ ?|\s"
    return train_tokenizer(corpus * 2, words=words, vocab_size=400, special_tokens=_SPECIAL, template=_CHAT_TEMPLATE)


def train_tokenizer(
    corpus: Iterable[str], *, words: str, vocab_size: int, special_tokens: Sequence[str], template: str
) -> Any:
    """Train a byte-level BPE tokenizer, which encodes any text.

    Args:
        words: regular expression that splits a text into words. No token spans two words.
        special_tokens: the first two are the padding token and the end-of-turn token.
        template: chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    pad, eos = special_tokens[:2]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=template)


def make_checkpoint(folder: Path, seed: int) -> int:
    """Save the quickstart's randomly initialized model and its tokenizer. Return the number of parameters."""
    return save_random_model(folder, make_tokenizer(), seed)


def save_random_model(
    folder: Path,
    tokenizer: Any,
    seed: int,
    *,
    layers: int = 2,
    width: int = 96,
    context: int = 256,
    rope_theta: float = 100.0,
) -> int:
    """Save a randomly initialized Llama model with its tokenizer. Return the number of parameters.

    ``width`` must be a multiple of 24. The initial weights are large, the heads are many and small, and the RoPE base is
    small. With usual values, the model learns the task more slowly.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 8,
        num_key_value_heads=width // 8,
        intermediate_size=width * 8 // 3,
        max_position_embeddings=context,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
