"""Converts GGUF files to cached checkpoint folders with dequantized weights."""

import errno
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from areno.cache_folder import building_folder, cache_folder
from areno.errors import UsageError

log = logging.getLogger(__name__)
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys for soft-capping of logits, which have the same names in GGUF files and in model configurations."""

_MORE = (("attention.key_length", "head_dim"), ("rope.freq_base_swa", "rope_local_base_freq"))
_ROPE = "rope_freqs.weight"
# llama.cpp's names of pre-tokenizers that first split off single digits, and then work like GPT-2's.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_DIGITS_FIRST = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
# llama.cpp's names of pre-tokenizers that ignore merges for a word that is a token.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
# Messages of the operating system, which the libraries that write the files pass on in errors of their own.
_NO_SPACE = re.compile("|".join(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))))


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is a file whose name ends in ``.gguf``."""
    path = Path(path).expanduser()
    return path.suffix.lower() == ".gguf" and path.is_file()


def gguf_folder(path: str | Path) -> Path:
    """Return the cached checkpoint folder of a GGUF file, with float32 weights, configuration, tokenizer and chat template.

    Raises:
        UsageError: the file is damaged, the model is unsupported, or the disk is full.
    """
    path = Path(path).expanduser().resolve()
    state = path.stat()
    key = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()
    target = cache_folder("gguf") / f"{path.stem}-{key[:16]}"
    if not target.is_dir():
        log.info("converting %s; the float32 weights are cached in %s", path, target)
        with building_folder(target) as building:
            alone = (
                building / path.name
            )  # in its own folder, because transformers would read a tokenizer.json next to it
            alone.symlink_to(path)
            try:
                _write(alone, building / "model")
            except Exception as error:  # a damaged file may fail in any way; the cause stays attached
                if _NO_SPACE.search(str(error)):
                    raise UsageError(
                        f"the converted weights of {path} could not be written to {target.parent}: {error}\nFree disk space, "
                        "or set ARENO_CACHE_DIR to a folder on a larger disk."
                    ) from error
                raise UsageError(
                    f"{path} could not be read: {error}\nIf the file is damaged or incomplete, download the file again. "
                    "Otherwise, use the folder of the original model, or a model of an architecture that transformers reads "
                    "from GGUF."
                ) from error
            if not target.is_dir():  # another process may have been faster
                (building / "model").rename(target)
    return target


def _write(path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    reader, loaded = GGUFReader(path), load_gguf_checkpoint(str(path))
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    file, splitting = folder / "tokenizer.json", loaded["tokenizer"].get("pre_tokenizer_type")
    state = json.loads(file.read_text(encoding="utf-8"))
    # transformers adds a GPT-2 token to every byte-level tokenizer, and does not split digits.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < loaded["config"]["vocab_size"]]
    if splitting in _WHOLE_WORDS:
        state["model"]["ignore_merges"] = True
    if splitting in _SINGLE_DIGITS:
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": _DIGITS_FIRST}
    file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
    _model(path, reader, loaded["config"]).save_pretrained(folder)


def _model(path: Path, reader: Any, values: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    metadata = {key.partition(".")[2]: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    for key, name in (*((cap, cap) for cap in SOFT_CAPS), *_MORE):  # transformers leaves these at their defaults
        if key in metadata:
            values.setdefault(name, metadata[key])
    if values["model_type"] in (
        "gemma2",
        "gemma3_text",
    ):  # llama.cpp also identifies the 27B models by their layer count
        large = values["num_hidden_layers"] in (46, 62)
        mean = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = mean if large else values["head_dim"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values.setdefault("attention_bias", "blk.0.attn_output.bias" in tensors)
    config = AutoConfig.for_model(**values, dtype=torch.float32)
    _set_rope_scaling(
        config, metadata.get("rope.scaling.type", "none"), tensors[_ROPE].data if _ROPE in tensors else None
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    unread = sum(int(tensor.n_elements) for name, tensor in tensors.items() if name != _ROPE)
    unread -= sum(weight.numel() for weight in weights.values())
    if unread:
        raise ValueError(f"{unread} weights of the file do not belong to a {type(model).__name__}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ValueError(f"the file lacks {len(missing)} weights, such as {missing[0]}")
    return model


def _set_rope_scaling(config: Any, scaling: str, factors: Any) -> None:
    """Set Llama 3's RoPE scaling in ``config`` if the GGUF file contains scaling ``factors``, which transformers ignores.

    ``scaling`` is the scaling type in the file, or ``none``. Raises ValueError if ``factors`` are not those of Llama 3. Without
    ``factors``, raises ValueError if the file has a scaling type but ``config`` contains no scaling.
    """
    import numpy as np

    rope = getattr(config, "rope_parameters", None) or {}
    if factors is not None:
        rope |= {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
        if not np.allclose(rope_factors(config).numpy(), factors, rtol=1e-4):
            raise ValueError(
                "the RoPE scaling of the model is unsupported, because it differs from the scaling of Llama 3"
            )
    elif scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(f"the RoPE scaling {scaling} of the model is unsupported")


def rope_factors(config: Any) -> Any:
    """Return the divisors that Llama 3's RoPE scaling applies to the frequencies, float32 [head_dim / 2]."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)).double() / len(scaled))
    return (plain / scaled).float()
