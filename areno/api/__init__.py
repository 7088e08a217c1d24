"""areno's Python SDK. Names are imported at their first use, so ``import areno.api`` does not import torch.

- ``trainer``: ``areno.Trainer``; ``sampler``: generation inside a ``session``; ``backend``: runs the models.
- ``run_training``: runs ``areno train`` and ``areno eval``; ``trainers``: run the steps of ``areno train``.
- ``replay``: runs ``areno replay`` on a run of ``areno train``.
- ``agentic``: runs agents; ``datasets`` and ``dataset_files``: load rows from files and from the Hugging Face Hub.
- ``evaluation``: evaluates a policy on held-out prompts; ``server_evaluation``: evaluates a model on a server.
- ``rewards``: creates the reward runner; ``records``: samples, and the records that reward functions receive.
- ``arguments``: checks the arguments of the SDK's methods.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "AlgorithmSpec": "areno.config.algorithms",
    "Areno": "areno.api.backend.base",
    "ArenoConfig": "areno.api.backend.base",
    "Backend": "areno.api.backend.base",
    "BackendType": "areno.api.backend.base",
    "ModelRole": "areno.types",
    "PromptBatch": "areno.types",
    "PromptItem": "areno.types",
    "RewardEvent": "areno.types",
    "RewardRecord": "areno.types",
    "RolloutResult": "areno.types",
    "RolloutSequence": "areno.types",
    "RolloutSession": "areno.api.session",
    "SamplingParams": "areno.types",
    "TrainSequence": "areno.types",
    "Trainer": "areno.api.trainer",
    "compute_gae": "areno.loss_fns",
    "compute_group_advantages": "areno.loss_fns",
    "dpo_loss_fn": "areno.loss_fns",
    "encode_generation_prompt": "areno.text.chat",
    "get_algorithm": "areno.config.algorithms",
    "grpo_loss_fn": "areno.loss_fns",
    "gspo_loss_fn": "areno.loss_fns",
    "kl_penalty": "areno.loss_fns",
    "list_advantages": "areno.config.advantages",
    "list_algorithms": "areno.config.algorithms",
    "ppo_loss_fn": "areno.loss_fns",
    "register_advantage": "areno.config.advantages",
    "register_algorithm": "areno.config.algorithms",
    "register_backend": "areno.api.backend.base",
    "reward_model_loss_fn": "areno.loss_fns",
    "sft_loss_fn": "areno.loss_fns",
    "value_loss_fn": "areno.loss_fns",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'areno.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
