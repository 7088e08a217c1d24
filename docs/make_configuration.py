"""Writes ``docs/configuration.md`` from the declarations in ``areno.config.experiment``.

    python docs/make_configuration.py

A test compares the file with `render`, so the page cannot drift from what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

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
"""Every class of settings, grouped by what one is looking for."""

_HEAD = """\
# Configuration of experiments

<!-- Written by docs/make_configuration.py from the declarations in areno/config/experiment; do not edit by hand. -->

An experiment is a YAML file, and a program that reads it:

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
file's path; a subclass of `GRPOConfig` may add fields of its own. `--help` prints every key.

## How a file is read

- **Overrides.** `key=value` sets any setting by its dotted path, whether the file has it or not. `+key=value` does the
  same, `~key` takes a key out of the file. Values are YAML: `[a, b]`, `{k: 1}`, `null`, `true`, `1e-4`. A later override
  wins. `actor.scheduling_spec.0.cpu=4` reaches into a list. `actor.lr` is short for `actor.optimizer.lr`.
- **Interpolation.** `${gconfig.n_samples}` is the value of another setting, also of one that has its default; `${actor}`
  is a whole section, `${.path}` a neighbour, `${oc.env:HOME}` a variable of the environment.
- **Written once.** `experiment_name`, `trial_name` and `cluster.fileroot` reach every section that has them. A section
  with another name is refused; only `saver.fileroot` and `recover.fileroot` may be another place.
- **Inherited.** Where a default below names another setting, an unset value is that one's: `ref` and `critic` take path
  and backend from `actor`, groups are `gconfig.n_samples` large.
- **By machine.** `auto`, and sizes that are not given, become what the machine has; a run prints them once. The value for
  a large GPU node stands in brackets.
- **Saved.** `save_config` writes the whole resolved configuration, which loads to the same one. Keys to services
  (`admin_api_key`, `wandb_api_key` and the like) are left out; give them anew, or by the services' own variables.
- **Errors.** All mistakes are listed at once, each with the nearest name, the value and what to write instead. A setting
  that asks for something that this version cannot do is an error, unless it has its default: areno's, or the one in brackets.
- **Notice.** Settings that change nothing here are accepted, and one notice in the log lists them with the reasons: sections
  of backends that are not used, resources for cluster schedulers, keys of services, what another setting decides.

## Backends

`actor.backend` and `rollout.backend` say which engine runs a role, on how many devices, and how they are divided:
`fsdp:d4` trains on four data-parallel ranks, `fsdp:d2t2` on two that are two tensor-parallel devices each, and `areno:d2`
generates on two. areno's own engine serves both: whole weights on each data-parallel rank, and the optimizer sharded
among them. On a CPU a device is a process. `ref` and `critic` live on the actor's ranks.

The grammar is `BACKEND[NAME]:SIZES` with the letters d (data), t (tensor), p (pipeline), c (context) and e (expert), for the
backends areno, sglang, vllm (d, t, p) and fsdp, megatron, archon (all five). `megatron:(attn:d4p2t2|ffn:d2p2e4)` divides
expert layers differently. `allocation_mode` holds several at once: `areno:d2+fsdp:d2` on devices of their own,
`areno[rollout]:d2|fsdp[actor]:d2` on the same ones. The forms of earlier versions, in which m is tensor parallel, are
translated: `areno.d2m1+d2m1`; `d2m1` alone, which is generation and training on the same devices; and sizes by model, as
`actor_gen:d2,*:d4`, where training has devices of its own. [Layouts](layouts.md) says which layouts run, [servers](servers.md)
what vLLM and SGLang need; an impossible layout is refused with the nearest possible one.

## Traps that are errors here

- `actor.kl_ctl` or `actor.kl_loss_coef` above 0 without a `ref`. Unset, `kl_ctl` is 0.1 with a `ref` alone, else 0.
- `rejection_sampling` without `use_decoupled_loss`, whose importance weight it bounds.
- A group of a normalisation that is not the `n_samples` answers to one prompt, or that has one member.
- `actor.temperature` or `actor.max_new_tokens` other than those of `gconfig`, with which was sampled.
- An evaluation without `valid_dataset`, and the other way round.

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
    """Every class of settings by name: those of all experiments, and the bases that declare their fields."""
    found: dict[str, type] = {}
    for root in (PPOConfig, GRPOConfig, SFTConfig, RWConfig, DPOConfig):
        kinds = [root, *(e.kind for e in paths_of(root).values() if e.shape in ("section", "sections"))]
        for kind in kinds:
            for base in kind.__mro__:
                if base is not object:
                    found.setdefault(base.__name__, base)
    return found


def where_used() -> dict[str, list[str]]:
    """For each class the keys of sections that are made of it, in YAML files of any kind."""
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
        lines.append(f"\nHas the settings of {' and '.join(f'[{base}](#{base.lower()})' for base in bases)} as well.")
    refused, no_effect = _common(entry.info.refused for entry in own), _common(entry.info.no_effect for entry in own)
    if refused:
        lines.append(f"\nNot supported: {refused}.")
    if no_effect:
        lines.append(f"\nAccepted without effect: {no_effect}.")
    if own:
        lines += ["\n" + _COLUMNS, *(_row(entry, tell=not (refused or no_effect)) for entry in own)]
    return "\n".join([*lines, ""])


def _common(reasons: Iterable[str]) -> str:
    """The reason that all settings of a section share; empty if there is none."""
    every = set(reasons)
    return every.pop() if len(every) == 1 else ""


def _is_own(entry: Setting, declaration: type) -> bool:
    """Declared here, or with another default than in the class that it is taken from."""
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
        yield f"*Only the default: {entry.info.refused}.*"
    if tell and entry.info.no_effect:
        yield f"*Accepted without effect: {entry.info.no_effect}.*"
    for value, words in entry.info.refused_values.items():
        yield f"*Not {value}: {words}.*"


def _quickstart() -> str:
    lines = [
        "## Keys of the quickstart\n",
        "`main_async_ppo.py` and `main_sync_ppo.py` take the keys below without a file. They are translated to the settings of "
        "PPOConfig, each of which can be given as well.\n",
        "| Key | Default | Setting | Meaning |\n|---|---|---|---|",
    ]
    for name, key in LEGACY_KEYS.items():
        settings = f"`{key.path}`"
        lines.append(f"| `{name}` | {key.shown} | {settings} | {key.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
