"""Writes ``docs/coming-from.md``: settings of other tools, and the equivalents in areno.

    python docs/make_coming_from.py

A test compares the file with `render`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areno.config.conversion_tables import TRL, VERL, Rule

PAGE = Path(__file__).with_name("coming-from.md")

_HEAD = """\
# Coming from TRL, verl or AReaL

<!-- Written by docs/make_coming_from.py; do not edit by hand. -->

`areno convert` prints the `areno train` command for a configuration of TRL or verl, and notes on settings without an
equivalent option:

```bash
areno convert trl grpo.yaml --learning_rate 2e-6
areno convert verl algorithm.adv_estimator=grpo data.train_batch_size=1024 actor_rollout_ref.rollout.n=5
```

Options of `areno convert` itself come before the settings: `areno convert --kind sft --devices 8 trl sft.yaml`. Check
the printed command with `--dry-run`, which checks options, paths and the reward function and estimates the memory, but loads
neither model nor data.

Reward functions for `areno train` differ from those for TRL and verl, and the data may differ. A *reward function* gets one
record with the model's answer and the data row, and returns a number or named parts ([rewards](rewards.md)), so you must adapt
the signature of your function. *Data* is a file or folder of JSON lines, CSV or Parquet, or a Hugging Face Hub dataset, with
prompts as text or messages ([data](data.md)).

## AReaL

areno reads AReaL's YAML files without conversion: `areno run FILE.yaml`. A setting that requests an unsupported feature is an
error. A notice at the start lists the settings that have no effect in areno, with the reasons ([experiments](experiments.md),
[settings](configuration.md)).
"""

_TRL = """
## TRL

With GRPO, `per_device_train_batch_size` counts answers on one device. `--batch-size` counts the prompts of a whole step and
equals per_device_train_batch_size x gradient_accumulation_steps x devices / num_generations.

"""

_VERL = """
## verl

"""


def _table(rules: Mapping[str, Rule]) -> str:
    lines = ["| setting | in areno |", "|---|---|"]
    for name, rule in rules.items():
        here = f"`{rule.option}`" if rule.option else ""
        lines.append(f"| `{name}` | {'; '.join(part for part in (here, rule.note) if part)} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """Return the whole page as Markdown."""
    return _HEAD + _TRL + _table(TRL) + _VERL + _table(VERL)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
