"""Options of ``areno replay``: the options of the recorded run, with changes.

Only options that affect an update on the recorded rows can be changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areno.config.algorithms import POLICY_TRAINER, get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.machine import resolved_device
from areno.config.options import flag_of, options_of
from areno.config.parser import Problems, parse_train
from areno.config.resume import StoredRun, value_of
from areno.config.validate import validate
from areno.errors import UsageError
from areno.gpus import visible_gpus

_CHANGEABLE = (
    *("algo", "reward_weights", "reward_normalize_parts", "seed", "world_size", "tp_size", "fsdp", "device", "dtype"),
    *("attn_backend", "trust_remote_code", "stall_timeout"),
)
"""Options that a replay may change, in addition to all options of the help section Train."""
_SHAPING = (
    *("advantage", "kl_reward_coef", "kl_reward_type", "reward_weights", "reward_normalize_parts"),
    *("gamma", "lam", "whiten_advantages", "bootstrap_truncated"),
)
"""Options on which the advantages depend."""
_NOT_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("save_path", "metrics_log_dir", "model_save_interval", "eval_dataset_path", "save_rollouts")),
    **dict.fromkeys(("max_steps", "max_sequences", "early_stop_patience", "resume")),
    **{"track": (), "trace": False, "keep_best": False},
}
"""Options of evaluation, reporting, saving and run length, with the values to which a replay resets these options."""
_UNREAD: dict[str, Any] = {
    **dict.fromkeys(("dataset_path", "dataset_loader_fn", "reward_fn_path", "reward_ckpt", "agent_fn", "workflow")),
    **{"rollout": "sync", "rollout_backend": "areno", "rollout_url": ()},
}
"""Options that a replay does not read, with the values that replace these options during validation.

The replacement is necessary, because the files or packages of these options may be missing.
"""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a recorded run, and the options of its replay."""

    recorded: TrainOptions
    replayed: TrainOptions

    @property
    def changes(self) -> list[str]:
        """One text for each option that the replay changes, such as ``--mini-bs 8 (recorded: 16)``."""
        names = sorted(self.replayed.explicit)
        values = ((name, value_of(self.recorded, name), value_of(self.replayed, name)) for name in names)
        return [f"{flag_of(name)} {new} (recorded: {old})" for name, old, new in values if old != new]

    @property
    def changes_advantages(self) -> bool:
        """Whether the replay changes an option that affects the advantages."""
        names = (*_SHAPING, *(("ref_ckpt",) if self.replayed.kl_reward_coef else ()))
        trainers = [get_algorithm(options.algo).trainer for options in (self.recorded, self.replayed)]
        return trainers[0] != trainers[1] or any(getattr(self.recorded, n) != getattr(self.replayed, n) for n in names)


def replay_options(run: Path, argv: Sequence[str], out: Path) -> ReplayOptions:
    """Read the options of a run of ``areno train``, and apply the flags in ``argv``.

    ``out`` is the directory of the new run. The new run repeats optimizer updates on rows that the original run recorded.
    Raises UsageError if the original run cannot be replayed, a flag is invalid, or a flag has no effect on these updates.
    """
    stored = StoredRun.read(run, "areno replay")
    options = parse_train(["--algo", stored.options.algo, *argv])
    explicit = frozenset(name for name in options.explicit if name != "algo" or options.algo != stored.options.algo)
    Problems.raise_all(_problems(stored.options, options, explicit))
    core = {entry.name for entry in options_of(TrainOptions)}
    extra = {name: options.extra[name] for name in explicit - core}
    kept = stored.options.extra if options.algo == stored.options.algo else options.extra
    changes = {name: getattr(options, name) for name in explicit & core} | {"extra": kept | extra}
    changes |= {"explicit": explicit | stored.options.explicit, "run_dir": str(out)}
    merged = replace(stored.options, **(_NOT_REPEATED | changes))
    checked = replace(merged, **_UNREAD, device=resolved_device(merged.device, visible_gpus()))
    validate(checked, needs_data=False)
    return ReplayOptions(stored.options, merged)


def _problems(recorded: TrainOptions, options: TrainOptions, explicit: frozenset[str]) -> Iterator[str]:
    spec = get_algorithm(recorded.algo)
    if not spec.requires_rollout:
        raise UsageError(
            f"--algo {spec.name} trains on its dataset, so there are no samples to replay; to repeat steps with other "
            "options, start a run with the checkpoint before those steps as --ckpt"
        )
    groups = {entry.name: entry.info.group for entry in options_of(TrainOptions)}
    for name in sorted(explicit):
        if name in groups and groups[name] != "Train" and name not in _CHANGEABLE:
            yield (
                f"{flag_of(name)} has no effect, because areno replay repeats updates on recorded rows; use only "
                "options of the loss, the advantages, the optimizer and the devices"
            )
    if get_algorithm(options.algo).trainer not in (spec.trainer, POLICY_TRAINER):
        yield (
            f"--algo {options.algo} cannot train on samples of {spec.name}, which lack inputs such as a critic's "
            "values or preference pairs; use another --algo"
        )
