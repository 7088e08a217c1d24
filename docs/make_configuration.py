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

An experiment is a YAML file, which `areno run` or your own program reads:

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

In Python, `load_expr_config(sys.argv[1:], GRPOConfig)` of `areno.config.experiment` returns the configuration and the
file's path; a subclass of `GRPOConfig` may add fields. The program's option `--help` prints every key.

## How a file is read

- **Overrides.** `key=value` sets any setting by its dotted path, even if the file lacks that setting. `+key=value` does the
  same, and `~key` removes a key of the file. Values are YAML: `[a, b]`, `{k: 1}`, `null`, `true`, `1e-4`. A later override
  wins. `actor.scheduling_spec.0.cpu=4` sets a field of a list item. `actor.lr` is short for `actor.optimizer.lr`.
- **Interpolation.** `${gconfig.n_samples}` is the value of another setting, even if that setting has its default. `${actor}` is
  a whole section, `${.path}` is a setting of the same section, and `${oc.env:HOME}` is an environment variable.
- **Written once.** `experiment_name`, `trial_name` and `cluster.fileroot` apply to every section that has these settings. A
  different value in a section is an error, except that `saver.fileroot` and `recover.fileroot` may differ from
  `cluster.fileroot`.
- **Inherited.** If a default below is the name of another setting, an unset value is inherited from that setting. For example,
  `ref` and `critic` inherit path and backend from `actor`, and the group size is inherited from `gconfig.n_samples`.
- **By machine.** `auto` values and unset sizes are resolved according to the machine, and a run prints the resolved values. For
  some settings, such as `cpu`, the tables give a different default for clusters in parentheses.
- **Saved.** `save_config` writes the whole resolved configuration; loading that file gives the same configuration. API keys of
  services (`admin_api_key`, `wandb_api_key` and similar settings) are omitted; set these keys again, or use the services'
  environment variables.
- **Errors.** Mistakes are listed together, each with the value and the remedy. For an unknown name, the message suggests a
  similar known name. A setting that requests an unsupported feature is an error, unless it has its default value.
- **Notice.** Some settings are accepted but have no effect in areno: sections of unused backends, resources for cluster
  schedulers, keys of services, and settings that another setting overrides. One notice in the log lists these settings with the
  reasons.

## Backends

`actor.backend` and `rollout.backend` specify the engine of a role, the number of devices, and how the devices are divided.
`fsdp:d4` trains on four data-parallel ranks, `fsdp:d2t2` trains on two data-parallel replicas of two tensor-parallel devices
each, and `areno:d2` generates on two devices. areno's own engine always trains, and also generates unless `rollout.backend`
selects vLLM or SGLang. Optimizer states are sharded across the data-parallel ranks. With `actor.fsdp.shard_weights`,
context or expert parallelism, weights and gradients are sharded as well. On a CPU, a device is a process. `ref` and `critic`
run on the actor's ranks.

The grammar is `BACKEND[NAME]:SIZES`. Each size is a letter and a number: d (data), t (tensor), p (pipeline), c (context) or
e (expert). `areno` supports d and t; `vllm` and `sglang` also support p. `fsdp` supports d, t and c; `megatron` and `archon`
support all five. `megatron:(attn:d4p2t2|ffn:d2p2e4)` gives expert layers a different layout than attention layers.

`allocation_mode` sets several backends at once. With `areno:d2+fsdp:d2`, generation and training have separate devices; with
`areno[rollout]:d2|fsdp[actor]:d2`, they share devices. areno also translates the forms of earlier AReaL versions, in which m is
the tensor-parallel size. With `areno.d2m1+d2m1`, generation and training have separate devices; with a single `d2m1`, they
share devices. Sizes by model, as in `actor_gen:d2,*:d4`, give training its own devices.

[Layouts](layouts.md) describes the supported layouts, and [servers](servers.md) the requirements of vLLM and SGLang. If a
layout is impossible, the error says how to correct the layout.

## Common mistakes that are errors

- `actor.kl_ctl` or `actor.kl_loss_coef` above 0 without a `ref`. If unset, `kl_ctl` is 0.1 with a `ref` and without
  `kl_loss_coef`, and 0 otherwise.
- `rejection_sampling` without `use_decoupled_loss`. The section bounds the importance weight of the decoupled loss.
- A `group_size` other than `n_samples`, or `mean_level: group` with `n_samples` 1.
- An `actor.temperature` or `actor.max_new_tokens` that differs from the value in `gconfig`, which sampling uses.
- Evaluator settings without `valid_dataset`.

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
    """Map the name of each section class to the dotted paths of its sections in YAML files of all kinds of experiments."""
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
        lines.append(f"\nAccepted without effect: {no_effect}.")
    if own:
        lines += ["\n" + _COLUMNS, *(_row(entry, tell=not (refused or no_effect)) for entry in own)]
    return "\n".join([*lines, ""])


def _common(reasons: Iterable[str]) -> str:
    """Return the reason that all settings of a section share; empty if there is no such reason."""
    every = set(reasons)
    return every.pop() if len(every) == 1 else ""


def _is_own(entry: Setting, declaration: type) -> bool:
    """Whether a class declares a setting itself, or changes the default from the base class."""
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
        yield f"*Accepted without effect: {reason}.*" if condition == reason else f"*Only read {condition}.*"
    for value, words in entry.info.refused_values.items():
        yield f"*Not {value}: {words}.*"


def _quickstart() -> str:
    lines = [
        "## Keys of the quickstart\n",
        "`main_async_ppo.py` and `main_sync_ppo.py` take the keys below and need no file. The keys are translated to "
        "settings of PPOConfig, which can also be set directly.\n",
        "| Key | Default | Setting | Meaning |\n|---|---|---|---|",
    ]
    for name, key in LEGACY_KEYS.items():
        settings = f"`{key.path}`"
        lines.append(f"| `{name}` | {key.shown} | {settings} | {key.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
