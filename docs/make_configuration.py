"""Writes ``docs/configuration.md`` from the declarations in ``areno.config.experiment``.

    python docs/make_configuration.py

A test compares the file with the result of `render`, so the page always agrees with the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from areno.config.effects import listed
from areno.config.experiment import DPOConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from areno.config.experiment.legacy import LEGACY_KEYS
from areno.config.experiment.setting_declaration import Setting, paths_of, settings_of

PAGE = Path(__file__).with_name("configuration.md")

GROUPS = {
    "Experiments": ["BaseExperimentConfig", "PPOConfig", "GRPOConfig", "SFTConfig", "RWConfig", "DPOConfig"],
    "Data": ["TrainDatasetConfig", "ValidDatasetConfig"],
    "Models and training": [
        "TrainEngineConfig",
        "OptimizerConfig",
        "MicroBatchSpec",
        "PPOCriticConfig",
        "DPOEngineConfig",
    ],
    "Algorithms": [
        "PPOActorConfig",
        "PolicyLossOptions",
        "NamedAlgorithm",
        "NormConfig",
        "RejectionSamplingConfig",
        "TeacherConfig",
    ],
    "Generation, rewards and agents": [
        "GenerationHyperparameters",
        "InferenceEngineConfig",
        "WorkflowConfig",
        "RewardConfig",
        "AgentConfig",
    ],
    "Saving, evaluation, recovery": ["FrequencyConfig", "SaverConfig", "EvaluatorConfig", "RecoverConfig"],
    "Statistics and traces": [
        "StatsLoggerConfig",
        "TensorBoardConfig",
        "WandBConfig",
        "SwanlabConfig",
        "TrackioConfig",
        "MLflowConfig",
        "PerfTracerConfig",
        "SessionTracerConfig",
        "MemoryProfilerConfig",
    ],
    "Machine and processes": [
        "ClusterSpecConfig",
        "NameResolveConfig",
        "SchedulerConfig",
        "SchedulingSpec",
        "SchedulingStrategy",
    ],
    "Other backends": [
        "FSDPEngineConfig",
        "FSDPWrapPolicy",
        "SGLangConfig",
        "vLLMConfig",
        "ArchonEngineConfig",
        "ArchonFP8Config",
        "MegatronEngineConfig",
        "DistributedDataParallelConfig",
        "FP8EngineConfig",
    ],
}
"""All classes of settings, grouped by topic."""

_HEAD = """\
# Configuration of experiments

<!-- Written by docs/make_configuration.py from the declarations in areno/config/experiment; do not edit by hand. -->

A YAML file configures an experiment. The command `areno run` or your own program reads the file:

```bash
python3 train.py --config experiment.yaml actor.lr=1e-4 seed=42
```

```yaml
experiment_name: gsm8k-grpo
trial_name: trial0
train_dataset: {path: data/gsm8k/train.jsonl, type: rl, batch_size: 8}
gconfig: {n_samples: 4, max_new_tokens: 128}
rollout: {backend: "areno:d1", max_head_offpolicyness: 2}
actor:
  backend: fsdp:d1
  path: some/model
  optimizer: {lr: 1e-5}
  reward_norm: {mean_level: group, std_level: group}
```

In Python, the call `load_expr_config(sys.argv[1:], GRPOConfig)` returns the configuration and the path of the file. Import
`load_expr_config` and `GRPOConfig` from `areno.config.experiment`. A subclass of `GRPOConfig` may add fields. With the option
`--help`, `load_expr_config` prints every key and exits.

## How a file is read

- **Overrides.** On the command line, `key=value` sets any setting by its dotted path, even if the file lacks this setting.
  `+key=value` has the same effect as `key=value`. `~key` removes a key of the file. Values are YAML, such as `[a, b]`,
  `{k: 1}`, `null` or `1e-4`. The last override of a key applies. `actor.scheduling_spec.0.cpu=4` sets a field of a list item.
  `actor.lr` is short for `actor.optimizer.lr`.
- **Interpolation.** `${gconfig.n_samples}` stands for the value of the setting `gconfig.n_samples`. If this setting is unset,
  `${gconfig.n_samples}` stands for its default. `${actor}` stands for a whole section, `${.path}` for a setting of the same
  section, and `${oc.env:HOME}` for an environment variable.
- **Written once.** `experiment_name`, `trial_name` and `cluster.fileroot` apply to every section that has these settings. A
  different value in a section is an error. Only `saver.fileroot` and `recover.fileroot` may differ from `cluster.fileroot`.
- **Inherited.** A default in the tables below may be the name of another setting. An unset setting then inherits the value of
  that setting. For example, a group size inherits `gconfig.n_samples`. `ref` and `critic` also inherit path and backend from
  `actor`.
- **By machine.** areno resolves `auto` values and unset sizes according to the machine. A run prints the resolved values. Some
  settings, such as `cpu`, have another default on clusters. The tables give this default in parentheses.
- **Saved.** The function `save_config` writes the whole resolved configuration. Loading the written file gives the same
  configuration. The file omits the API keys of services (`admin_api_key`, `wandb_api_key` and similar settings). Set these keys
  again, or use the environment variables of the services.
- **Errors.** areno reports all mistakes together, each with the value and the remedy. For an unknown name, the message suggests
  a similar known name. Settings of unsupported features accept only their default values.
- **Notice.** Some settings are accepted but have no effect: sections of unused backends, resources for cluster schedulers,
  settings of gateway services (`_version: v2`, which is not supported), and settings that another setting overrides. A notice
  in the log lists these settings and the reasons.

## Backends

The settings `actor.backend` (training) and `rollout.backend` (generation) specify the engine, the number of devices and the
parallelism. For example, `fsdp:d4` trains on four data-parallel ranks. `fsdp:d2t2` trains on two data-parallel replicas of two
tensor-parallel devices each. `areno:d2` generates on two devices. For training, the names `fsdp`, `megatron` and `archon` all
select areno's own engine. Generation uses the same engine, unless `rollout.backend` selects vLLM or SGLang. areno shards
optimizer states across the data-parallel ranks. If `actor.fsdp.shard_weights` is true, areno also shards weights and gradients.
With context parallelism or expert parallelism, areno always shards weights and gradients. On a CPU, a device is a process.
`ref` and `critic` run on the actor's ranks.

The values of `actor.backend` and `rollout.backend` have the form `BACKEND:SIZES`. Each size is a letter and a number. The
letters are d (data), t (tensor), p (pipeline), c (context) and e (expert parallelism). The backend `areno` supports d and t.
`vllm` and `sglang` support d, t and p. `fsdp` supports d, t and c. `megatron` and `archon` support all five letters.
`megatron:(attn:d4p2t2|ffn:d2p2e4)` gives expert layers a different layout than attention layers.

The setting `allocation_mode` sets several backends at once. With `areno:d2+fsdp:d2`, generation and training have separate
devices. With `areno[rollout]:d2|fsdp[actor]:d2`, generation and training share devices; the brackets contain the role of each
backend. areno also accepts the notation of earlier AReaL versions, in which m is the tensor-parallel size. With
`areno.d2m1+d2m1`, generation and training have separate devices. With a single `d2m1`, generation and training share devices.
In the earlier notation `actor_gen:d2,*:d4`, generation (`actor_gen`) has two devices. All other tasks (`*`), such as training,
have four other devices.

[Layouts](layouts.md) describes the supported layouts. [Servers](servers.md) describes the requirements of vLLM and SGLang. The
error about an impossible layout contains the remedy.

## Common mistakes that are errors

- `actor.kl_ctl` or `actor.kl_loss_coef` is above 0, but the section `ref` is missing. With `ref` and without `kl_loss_coef`,
  the default of `kl_ctl` is 0.1. Otherwise, the default is 0.
- `rejection_sampling` is set without `use_decoupled_loss`. The bounds in `rejection_sampling` apply to the importance weights
  of the [decoupled loss](algorithms.md#algorithms-that-share-one-policy-loss).
- `group_size` of a normalization with level `group` differs from `n_samples`.
- `mean_level` is `group`, but `n_samples` is 1.
- `actor.temperature` or `actor.max_new_tokens` differs from the value in `gconfig`, which sampling uses.
- The section `evaluator` has settings, but the section `valid_dataset` is missing.

"""
_COLUMNS = "| Setting | Type | Default | Meaning |\n|---|---|---|---|"


def render() -> str:
    """Return the whole page as Markdown."""
    classes = declared()
    places = where_used()
    parts = [_HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [_section(classes[name], places.get(name, [])) for name in names]
    return "\n".join([*parts, _quickstart()])


def declared() -> dict[str, type]:
    """Return all classes of settings by name: the classes of experiments and sections, and their base classes."""
    found: dict[str, type] = {}
    for root in (PPOConfig, GRPOConfig, SFTConfig, RWConfig, DPOConfig):
        kinds = [root, *(e.kind for e in paths_of(root).values() if e.shape in ("section", "sections"))]
        for kind in kinds:
            for base in kind.__mro__:
                if base is not object:
                    found.setdefault(base.__name__, base)
    return found


def where_used() -> dict[str, list[str]]:
    """Return a dictionary from the name of each section class to the paths of its sections in a YAML file.

    For example, a section of the class ``OptimizerConfig`` has the path ``actor.optimizer``. The paths include those of all
    kinds of experiments: RL, SFT, DPO and reward models.
    """
    places: dict[str, dict[str, None]] = {}
    for root in (GRPOConfig, DPOConfig, SFTConfig, RWConfig):
        for path, entry in paths_of(root).items():
            if entry.shape in ("section", "sections"):
                places.setdefault(entry.kind.__name__, {})[path.replace(".0.", ".N.")] = None
    return {name: list(paths) for name, paths in places.items()}


def _section(declaration: type, places: list[str]) -> str:
    doc = " ".join((declaration.__doc__ or "").split())
    own = [entry for entry in settings_of(declaration).values() if _is_own(entry, declaration)]
    bases = [base.__name__ for base in declaration.__mro__[1:-1]]
    lines = [f"### {declaration.__name__}\n", doc]
    if places:
        shown = ", ".join(f"`{path}`" for path in places[:4])
        lines.append(f"\nUsed as {shown}{' and others' if len(places) > 4 else ''}.")
    if bases:
        lines.append(f"\nAlso has the settings of {listed([f'[{base}](#{base.lower()})' for base in bases])}.")
    refused, no_effect = _common(entry.info.refused for entry in own), _common(entry.info.no_effect for entry in own)
    if refused:
        lines.append(f"\nNot supported: {refused}.")
    if no_effect:
        lines.append(f"\nThese settings have no effect: {no_effect}.")
    if own:
        lines += ["\n" + _COLUMNS, *(_row(entry, tell=not (refused or no_effect)) for entry in own)]
    return "\n".join([*lines, ""])


def _common(reasons: Iterable[str]) -> str:
    """Return the reason that all settings of a section have in common; an empty string if their reasons differ.

    ``reasons`` has one text per setting. The text states why areno refuses the setting, or why the setting has no effect.
    """
    every = set(reasons)
    return every.pop() if len(every) == 1 else ""


def _is_own(entry: Setting, declaration: type) -> bool:
    bases = [base for base in declaration.__mro__[1:-1] if entry.name in settings_of(base)]
    return not bases or entry.default_text != settings_of(bases[0])[entry.name].default_text


def _row(entry: Setting, *, tell: bool) -> str:
    kind = entry.type_text
    if entry.shape in ("section", "sections"):
        kind = kind.replace(entry.kind.__name__, f"[{entry.kind.__name__}](#{entry.kind.__name__.lower()})")
    cells = (f"`{entry.name}`", kind, entry.default_text, " ".join(_meaning(entry, tell=tell)))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _meaning(entry: Setting, *, tell: bool) -> Iterator[str]:
    yield entry.info.help
    if entry.info.choices:
        yield f"One of {', '.join(entry.info.choices)}."
    if tell and entry.info.refused:
        yield f"*Only the default is accepted: {entry.info.refused}.*"
    if tell and entry.info.no_effect:
        reason = entry.info.no_effect
        condition = reason.removeprefix("only read ")
        yield f"*Has no effect: {reason}.*" if condition == reason else f"*Only read {condition}.*"
    for value, words in entry.info.refused_values.items():
        yield f"*The value {value} is an error: {words}.*"


def _quickstart() -> str:
    lines = [
        "## Keys of the quickstart\n",
        "The programs `main_async_ppo.py` and `main_sync_ppo.py` take the keys below and need no YAML file. areno translates "
        "each key to a setting of PPOConfig. You can also set the settings of PPOConfig directly.\n",
        "| Key | Default | Setting | Meaning |\n|---|---|---|---|",
    ]
    for name, key in LEGACY_KEYS.items():
        settings = f"`{key.path}`"
        lines.append(f"| `{name}` | {key.shown} | {settings} | {key.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
