"""Export a model in Hugging Face format. An adapter is merged into its base model."""

from pathlib import Path

import torch

from areno.config.paths import base_of, is_adapter, tokenizer_of
from areno.engine.limits import read_config
from areno.engine.model.attach_adapter import brings_head
from areno.engine.model.loading import LoadOptions
from areno.engine.model.value_model import is_classifier
from areno.engine.role import load_role
from areno.engine.train.outputs import ModelKind
from areno.text.chat import load_tokenizer
from areno.text.hub import check_reachable


def export_model(
    path: str, output: str, *, dtype: str | None = None, gguf: str | None = None, trust_remote_code: bool = False
) -> Path:
    """Write a model and its tokenizer in Hugging Face format. An adapter is merged into its base model.

    An adapter is merged in fp32 on the CPU, and the merged weights are rounded once. An adapter that was trained on a 4-bit
    base model is merged into the original weights, which are not quantized.

    Args:
        dtype: dtype of the exported weights, ``float32`` or ``bfloat16``. None means the dtype in the base model's
            configuration, or ``float32`` if the configuration names no dtype.
        gguf: type of the matrices in an additional file ``model-TYPE.gguf`` in the output folder; None: no GGUF file.

    Raises:
        UsageError: the configuration or the weights cannot be read, the adapter does not fit the base model, or the GGUF export
            does not support the model.
    """
    base, folder = base_of(path), Path(output).expanduser()
    check_reachable(base)
    config = read_config(path, option="--ckpt", trust_remote_code=trust_remote_code)
    stored = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    has_head = brings_head(path) if is_adapter(path) else is_classifier(config)
    kind: ModelKind = "reward" if has_head else "policy"
    options = LoadOptions(dtype=torch.float32, trust_remote_code=trust_remote_code)
    role = load_role("actor", path, kind, options, None, False)
    role.model.module.to(stored)
    tokenizer = load_tokenizer(tokenizer_of(path), trust_remote_code=trust_remote_code)
    if gguf:  # first, because it fails before writing anything if GGUF does not support the model
        from areno.engine.checkpoint.gguf_export import write_gguf

        write_gguf(role.model.module, tokenizer, folder / f"model-{gguf}.gguf", gguf)
    role.save_model(folder, tokenizer)
    return folder
