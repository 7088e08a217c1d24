"""Writes ``docs/coming-from.md``: settings of other tools, and the equivalents in areno.

    python docs/make_coming_from.py

A test compares the file with the result of :func:`render`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areno.config.conversion_tables import TRL, VERL, Rule

PAGE = Path(__file__).with_name("coming-from.md")

_HEAD = """\
# Coming from TRL, verl or AReaL

<!-- Written by docs/make_coming_from.py; do not edit by hand. -->

The command `areno convert` prints the `areno train` command for a configuration of TRL or verl, and a note for each setting
without an equivalent option. Two examples:

```bash
areno convert trl grpo.yaml --learning_rate 2e-6
areno convert verl algorithm.adv_estimator=grpo data.train_batch_size=1024 actor_rollout_ref.rollout.n=5
```

Options of `areno convert` itself come before the name of the tool: `areno convert --kind sft --devices 8 trl sft.yaml`. Add the
option `--dry-run` to the printed command to check options, paths and the reward function, and to estimate the memory. A dry run
loads no model and no data.

Reward functions of TRL and verl need a different signature in areno. A *reward function* of areno gets one record with the
model's answer and the data row, and returns a number or a dictionary of [named parts](rewards.md#named-parts). Datasets may
need a conversion, too. *Data* is a file or folder of JSON lines, CSV or Parquet, or a Hugging Face Hub dataset. Prompts are
text or messages ([data](data.md)).

## AReaL

areno reads AReaL's YAML files without conversion: `areno run FILE.yaml`. A setting that requests an unsupported feature causes
an error. Some settings have no effect in areno: a notice at the start lists these settings with the reasons
([experiments](experiments.md), [settings](configuration.md)).
"""

_TRL = """
## TRL

With GRPO, TRL's `per_device_train_batch_size` counts answers on one device. areno's `--batch-size` counts the prompts of a
whole step: per_device_train_batch_size x gradient_accumulation_steps x devices / num_generations.

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
