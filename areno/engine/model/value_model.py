"""Critics and reward models: a body, and a linear head that is applied to each token.

Each model is a ``transformers`` sequence classifier, so that other programs can load saved checkpoints. The checkpoint may
store the head under any of the names in ``HEAD_NAMES``. If the checkpoint has no head, the head is initialized to zero. If the
head has several outputs, the last output is used.
"""

from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from areno.engine.model.packed_model import PackedModel
from areno.errors import UnsupportedModelError, UsageError

HEAD_NAMES = ("score", "v_head", "classifier", "reward_head", "value_head")


class ValueModel(PackedModel):
    """A ``transformers`` sequence classifier. Its head ``score`` computes one scalar per token."""

    def values(self, hidden: Tensor) -> Tensor:
        """Return the values [N] of hidden states [N, C], in fp32."""
        head = cast(nn.Linear, self.module.score)
        bias = None if head.bias is None else head.bias[-1:].float()
        return nn.functional.linear(hidden.float(), head.weight[-1:].float(), bias)[:, 0]


def classifier_class(config: PretrainedConfig) -> type[nn.Module]:
    """Return the sequence classifier class of an architecture. If ``transformers`` has no such class, the class is created."""
    mapping: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None:
        raise UnsupportedModelError(
            f"{type(config).__name__}: transformers has no causal language model of this architecture; use another "
            "model"
        )
    base = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    return type(name, (GenericForSequenceClassification, base), {})


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint with this configuration is a sequence classifier."""
    return any("ForSequenceClassification" in name for name in config.architectures or ())


def read_head(path: str) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight [outputs, hidden size] and the bias [outputs] of the head of a critic or reward model.

    Return None if the checkpoint has no head. The bias is None if the head has no bias. ``path`` is a
    folder or a hub id; for a hub id, the weights are downloaded.
    """
    names = [f"{prefix}{name}" for name in HEAD_NAMES for prefix in ("", "model.")]
    for file in _weight_files(path):
        tensors = _read_tensors(file, {f"{name}.{kind}" for name in names for kind in ("weight", "bias")})
        for name in names:
            if (weight := tensors.get(f"{name}.weight")) is not None:
                return _as_rows(weight, path), tensors.get(f"{name}.bias")
    return None


def _weight_files(path: str) -> list[Path]:
    folder = Path(path).expanduser()
    is_local = folder.is_dir()
    # On the hub, other safetensors files are copies in other formats, such as Mistral's consolidated.safetensors.
    for pattern in ("*.safetensors" if is_local else "model*.safetensors", "pytorch_model*.bin"):
        if not is_local:
            folder = Path(snapshot_download(path, allow_patterns=pattern, ignore_patterns="*/*"))
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _read_tensors(file: Path, names: set[str]) -> dict[str, Tensor]:
    if file.suffix == ".bin":
        stored = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        return {name: stored[name].clone() for name in names & stored.keys()}
    with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
        return {name: opened.get_tensor(name) for name in names.intersection(opened.keys())}


def install_head(module: Any, head: tuple[Tensor, Tensor | None] | None) -> None:
    """Set the scalar head of a module. If ``head`` is None, set a head of zeros with a single output."""
    hidden = int(module.config.get_text_config().hidden_size)
    like = next(module.parameters())
    weight, bias = head if head is not None else (torch.zeros(1, hidden), None)
    if weight.shape[1] != hidden:
        raise UsageError(
            f"the scalar head of this checkpoint takes {weight.shape[1]} features, but the hidden states of the model have "
            f"{hidden}; use another checkpoint"
        )
    score = nn.Linear(hidden, weight.shape[0], bias=bias is not None, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        score.weight.copy_(weight)
        if bias is not None:
            score.bias.copy_(bias)
    module.score = score
    module.num_labels = module.config.num_labels = weight.shape[0]


def _as_rows(weight: Tensor, path: str) -> Tensor:
    """Reshape a head's weight to [outputs, C], for hidden size C. A head with one output may be stored as [C] or [C, 1]."""
    if weight.ndim == 1:
        return weight[None]
    if weight.ndim != 2:
        raise UsageError(
            f"{path}: the scalar head has the shape {tuple(weight.shape)}, but the shape must be [outputs, features]; use "
            "another checkpoint"
        )
    return weight.T if weight.shape[1] == 1 else weight
