"""Experiment settings that correspond to options of ``areno train``, for texts that advise users of both front ends."""

import re

SETTINGS = {
    "--gradient-accumulation-steps": "actor.ppo_n_minibatches",
    "--early-stop-patience": "evaluator.early_stop_patience",
    "--eval-dataset-path": "valid_dataset.path",
    "--max-context-len": "gconfig.max_tokens",
    "--max-prompt-tokens": "train_dataset.max_length",
    "--max-new-tokens": "gconfig.max_new_tokens",
    "--grad-clip-norm": "actor.optimizer.gradient_clipping",
    "--reward-fn-path": "reward.fn",
    "--reward-weights": "reward.weights",
    "--dtype float32": "actor.dtype=float32",
    "--clip-eps-high": "actor.eps_clip_higher",
    "--max-staleness": "rollout.max_head_offpolicyness",
    "--update-epochs": "actor.ppo_n_epochs",
    "--temperature": "gconfig.temperature",
    "--batch-size": "train_dataset.batch_size",
    "--n-samples": "gconfig.n_samples",
    "--max-steps": "total_train_steps",
    "--keep-best": "evaluator.keep_best",
    "--kl-coef": "actor.kl_loss_coef",
    "--epochs": "total_train_epochs",
    "--lr": "actor.optimizer.lr",
}
"""Settings by option."""

_OPTION = re.compile("|".join(rf"{re.escape(option)}(?![\w-])" for option in SETTINGS))


def in_settings(text: str) -> str:
    """Replace options of ``areno train`` in a text by the settings of an experiment."""
    return _OPTION.sub(lambda match: SETTINGS[match[0]], text)
