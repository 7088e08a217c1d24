"""Reads and writes options as YAML: a flat mapping from option names to values.

Option names may be written with dashes or underscores. The ``config.yaml`` of a run is also a valid ``--config`` file for a new
run, because ``config.yaml`` contains neither the old run's location nor options without effect.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.effects import without_effect
from areno.config.options import Option, name_of, options_of
from areno.config.paths import absolute_if_exists
from areno.errors import UsageError

if TYPE_CHECKING:  # `areno check`, which imports this module, reports a missing PyYAML
    import yaml


@functools.cache
def _loader() -> "type[yaml.SafeLoader]":
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """Rejects duplicate keys; PyYAML would silently use the last value."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if key.tag == self.DEFAULT_SCALAR_TAG:  # text, and not the merge key <<
                    if key.value in seen:
                        raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                    seen.add(key.value)
            return node

    return UniqueKeyLoader


def load_config(path: str | Path, *, option: str = "--config") -> dict[str, Any]:
    """Read a YAML file of options, and return a dictionary of option names and values.

    The values are not converted or checked. Dashes in option names are replaced by underscores. Error messages start with
    ``option``. Keys with the value ``null`` are omitted, because ``null`` means unset.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"{option} file does not exist: {path}; pass a YAML file of option names and values")
    return _normalized(read_mapping(path, f"{option} {path}"), f"{option} {path}")


def flat(values: Mapping[Any, Any], *, indexed: bool = False, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in nested mappings, with its dotted name. If ``indexed`` is true, lists of mappings are also
    flattened, with names such as ``name.0.key``.
    """
    for name, value in values.items():
        if indexed and isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from flat(value, indexed=indexed, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_mapping(path: Path, where: str) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping with unique keys; an empty file gives {}. Error messages start with ``where``."""
    import yaml

    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where}{line} is not valid YAML: {error.problem}; fix the file") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{where} cannot be read: {error}; pass a YAML text file") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(
            f"{where} must contain a mapping, but contains a {type(loaded).__name__}; write lines such as `lr: 1.0e-5`"
        )
    return loaded


def _normalized(loaded: dict[Any, Any], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        if not isinstance(key, str):
            raise UsageError(f"{where}: the key {key!r} is not text; quote or remove the key")
        if isinstance(value, dict):
            raise UsageError(f"{where}: {key} is a mapping; options are flat, so write one value or a list")
        name = name_of(key)
        if name in values:
            raise UsageError(f"{where}: {key} appears twice, with dashes and with underscores; keep only one spelling")
        if value is not None:
            values[name] = value
    return values


def stored_values(options: TrainOptions) -> dict[str, Any]:
    """Return the values for ``config.yaml``.

    These are the options that the run reads, without options that have ``stored=False``. ``activation_checkpointing`` is
    omitted if the user did not set it, because a resumed run would treat a stored value as set by the user. Paths are absolute,
    so that the run can be resumed from any folder.
    """
    spec = get_algorithm(options.algo)
    omitted = set(without_effect(options, spec))
    if options.recomputes is None:
        omitted.add("activation_checkpointing")
    values = {
        entry.name: stored_value(entry, getattr(options, entry.name))
        for entry in options_of(TrainOptions)
        if entry.info.stored and entry.name not in omitted
    }
    extra = options.extra
    values |= {e.name: stored_value(e, extra[e.name]) for e in spec.own_options() if e.name in extra}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def stored_value(entry: Option, value: Any) -> Any:
    """Convert the value of one option to the form that ``config.yaml`` stores."""
    return absolute_if_exists(value, python=entry.info.path == "python") if entry.info.path else value


def dump_config(options: TrainOptions) -> str:
    """Format the options as YAML for `load_config`, in the order of ``--help``."""
    import yaml

    return yaml.safe_dump(stored_values(options), sort_keys=False, allow_unicode=True, default_flow_style=None)
