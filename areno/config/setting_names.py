"""Settings of experiment files (``areno run``) that correspond to options of ``areno train``."""

import re

SETTINGS = {
    "--gradient-accumulation-steps": "actor.ppo_n_minibatches",
    "--return-routed-experts": "rollout.return_routed_experts",
    "--early-stop-patience": "evaluator.early_stop_patience",
    "--update-minibatches": "actor.ppo_n_minibatches",
    "--eval-dataset-path": "valid_dataset.path",
    "--max-prompt-tokens": "train_dataset.max_length",
    "--whiten-advantages": "actor.adv_norm",
    "--max-context-len": "gconfig.max_tokens",
    "--grad-clip-norm": "actor.optimizer.gradient_clipping",
    "--kl-reward-coef": "actor.kl_ctl",
    "--max-new-tokens": "gconfig.max_new_tokens",
    "--eval-interval": "evaluator.freq_steps",
    "--reward-fn-path": "reward.fn",
    "--reward-weights": "reward.weights",
    "--reward-workers": "reward.max_workers",
    "--value-clip-eps": "critic.eps_clip",
    "--clip-eps-high": "actor.eps_clip_higher",
    "--dtype float32": "actor.dtype=float32",
    "--max-staleness": "rollout.max_head_offpolicyness",
    "--update-epochs": "actor.ppo_n_epochs",
    "--temperature": "gconfig.temperature",
    "--batch-size": "train_dataset.batch_size",
    "--critic-lr": "critic.optimizer.lr",
    "--keep-best": "evaluator.keep_best",
    "--eval-before-train": "evaluator.eval_before_train",
    "--max-steps": "total_train_steps",
    "--n-samples": "gconfig.n_samples",
    "--dpo-beta": "actor.beta",
    "--kl-coef": "actor.kl_loss_coef",
    "--epochs": "total_train_epochs",
    "--top-k": "gconfig.top_k",
    "--top-p": "gconfig.top_p",
    "--lr": "actor.optimizer.lr",
}

_OPTION = re.compile("|".join(rf"{re.escape(option)}(?![\w-])" for option in SETTINGS))


def in_settings(text: str) -> str:
    """Replace options of ``areno train`` in a text with the corresponding settings of an experiment file (``areno run``)."""
    return _OPTION.sub(lambda match: SETTINGS[match[0]], text)
