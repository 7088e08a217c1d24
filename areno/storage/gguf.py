"""A model in a GGUF file, as a checkpoint folder: its weights are dequantized once and kept in the cache."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from areno.cache_folder import building_folder, cache_folder
from areno.errors import UsageError

log = logging.getLogger(__name__)
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Named alike in GGUF and in a configuration."""

_MORE = (("attention.key_length", "head_dim"), ("rope.freq_base_swa", "rope_local_base_freq"))
_ROPE = "rope_freqs.weight"
# llama.cpp's names for splitting digits from everything and from each other, then as GPT-2 does.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_DIGITS_FIRST = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
# Its names for taking a word that is a token as it is, whatever the merges make of it.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")


def is_gguf(place: str | Path) -> bool:
    """Whether ``place`` is a file whose name ends in ``.gguf``."""
    path = Path(place).expanduser()
    return path.suffix.lower() == ".gguf" and path.is_file()


def gguf_folder(place: str | Path) -> Path:
    """The checkpoint folder of a GGUF file, in the cache: float32 weights, configuration, tokenizer and chat template.

    UsageError: the file is damaged, or holds a model that cannot be read.
    """
    path = Path(place).expanduser().resolve()
    state = path.stat()
    key = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()
    target = cache_folder("gguf") / f"{path.stem}-{key[:16]}"
    if not target.is_dir():
        log.info("reading %s; its float32 weights are kept in %s", path, target)
        with building_folder(target) as building:
            alone = building / path.name  # transformers would take a tokenizer.json that lies beside it
            alone.symlink_to(path)
            try:
                _write(alone, building / "model")
            except Exception as error:  # a damaged file may fail in any way; the cause stays attached
                raise UsageError(
                    f"{path} could not be read: {error}\nFetch it again if it is damaged or incomplete; else give a file of "
                    "an architecture that transformers reads from GGUF, or the folder of the original model."
                ) from error
            if not target.is_dir():  # no other process was faster
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
    # transformers adds a token of GPT-2 to all byte-level tokenizers, and would join digits.
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

    facts = {key.partition(".")[2]: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    for key, name in (*((cap, cap) for cap in SOFT_CAPS), *_MORE):  # which stay at their defaults
        if key in facts:
            values.setdefault(name, facts[key])
    if values["model_type"] in ("gemma2", "gemma3_text"):  # llama.cpp knows the 27B models by their layers
        large = values["num_hidden_layers"] in (46, 62)
        mean = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = mean if large else values["head_dim"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values.setdefault("attention_bias", "blk.0.attn_output.bias" in tensors)
    config = AutoConfig.for_model(**values, dtype=torch.float32)
    _set_positions(config, facts.get("rope.scaling.type", "none"), tensors[_ROPE].data if _ROPE in tensors else None)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    unread = sum(int(tensor.n_elements) for name, tensor in tensors.items() if name != _ROPE)
    unread -= sum(weight.numel() for weight in weights.values())
    if unread:
        raise ValueError(f"{unread} of its weights have no place in a {type(model).__name__}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if absent := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ValueError(f"it lacks {len(absent)} weights, such as {absent[0]}")
    return model


def _set_positions(config: Any, scaling: str, factors: Any) -> None:
    """Scaled positions: Llama 3's are stored as factors, and were all made alike; transformers reads none of a dense model."""
    import numpy as np

    rope = getattr(config, "rope_parameters", None) or {}
    if factors is not None:
        rope |= {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
        if not np.allclose(rope_factors(config).numpy(), factors, rtol=1e-4):
            raise ValueError("its positions are scaled otherwise than those of Llama 3")
    elif scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ValueError(f"its positions are scaled in a way that cannot be read: {scaling}")


def rope_factors(config: Any) -> Any:
    """By how much each frequency of Llama 3's positions is divided, float32 [head_dim / 2]."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)).double() / len(scaled))
    return (plain / scaled).float()
