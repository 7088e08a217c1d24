"""Real tokenizers of both kinds, trained on the spot."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 5,
    "1 + 1 = 2, stop here\n\n",
    "naïve café 你好世界 🙂👍 été",
]
CHATML = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def make_byte_level(vocab_size: int = 400, add_bos: bool = False, chat_template: str | None = None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer, add_bos, chat_template)


def make_metaspace(vocab_size: int = 500, add_bos: bool = False, chat_template: str | None = None):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab = trained["vocab"] | {f"<0x{byte:02X}>": len(trained["vocab"]) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    return _wrap(tokenizer, add_bos, chat_template)


def _wrap(tokenizer: Tokenizer, add_bos: bool, chat_template: str | None):
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=chat_template,
    )


MAKERS = {"byte_level": make_byte_level, "metaspace": make_metaspace}


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tokenizer(request):
    """Both kinds, one after the other."""
    return MAKERS[request.param]()


@pytest.fixture(scope="session")
def make_tokenizer():
    """``make_tokenizer(kind, add_bos=..., chat_template=...)``."""
    return lambda kind="byte_level", **options: MAKERS[kind](**options)


@pytest.fixture(scope="session")
def chatml():
    """A chat template with a thinking switch, which refuses the role ``bad``."""
    return CHATML
