"""Run directories, and resuming with ``--resume``.

A resumed run accepts new values for options with ``changes_results=False``, for example options for the number of steps,
devices, saving, evaluation, timeouts and logging. All other options must keep their values.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.options import Option, flag_of, options_of
from areno.config.parser import Problems, build_options, convert_values, extra_options
from areno.config.paths import RUNS_ROOT
from areno.config.yaml_io import load_config, stored_value
from areno.errors import CheckpointError, UsageError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import is_run

_AUTO = "auto"  # value of the bare flag


def apply_resume(options: TrainOptions) -> TrainOptions:
    """Determine the run directory and, with ``--resume``, the options of the old run.

    Without ``--resume``, the run directory is ``--run-dir`` or a new directory. With ``--resume``, both the run directory and
    ``resume`` are set to the old run's directory, and options that are not set explicitly come from the old run.

    Raises UsageError if the old run is not found, or an explicit option would change results.
    """
    if options.resume is None:
        if options.resume_step is not None:
            raise UsageError(
                f"--resume-step {options.resume_step} needs --resume, because the option selects a checkpoint of the resumed "
                "run; add --resume"
            )
        return options if options.run_dir else replace(options, run_dir=str(new_run_dir(options.algo)))
    if options.resume != _AUTO:
        return _continue(options, _named_run(options, Path(options.resume).expanduser()))
    if options.run_dir and is_run(Path(options.run_dir)):
        return _continue(options, StoredRun.read(Path(options.run_dir)))
    return _continue(options, _newest_run(options))


def new_run_dir(algo: str, now: datetime | None = None) -> Path:
    """Return the path ``runs/<algo>-<YYYYmmdd-HHMMSS>``. If the path exists, a numeric suffix is added."""
    name = f"{get_algorithm(algo).name}-{(now or datetime.now()):%Y%m%d-%H%M%S}"
    path, number = RUNS_ROOT / name, 2
    while path.exists():
        path, number = RUNS_ROOT / f"{name}-{number}", number + 1
    return path


def claim_run_dir(options: TrainOptions) -> TrainOptions:
    """Create the directory of a new run. If a concurrent run has taken the directory's name, choose another name.

    Do nothing for a resumed run, or if ``--run-dir`` is set.
    """
    if options.resume is not None or "run_dir" in options.explicit:
        return options
    while True:
        try:
            options.run_path.mkdir(parents=True)
            return options
        except FileExistsError:
            options = replace(options, run_dir=str(new_run_dir(options.algo)))
        except OSError as error:
            raise UsageError(
                f"run directory {options.run_path} cannot be created: {error.strerror or error}; choose another directory "
                "with --run-dir"
            ) from error


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run directory and the options in its ``config.yaml``."""

    path: Path
    options: TrainOptions
    entries: tuple[Option, ...]

    @classmethod
    def read(cls, path: Path, option: str = "--resume") -> StoredRun:
        """Read the options of a run directory. Error messages start with ``option``."""
        file = path / "config.yaml"
        raw = load_config(file, option=option)
        spec = get_algorithm(str(raw.get("algo", TrainOptions.algo)))
        entries = (*options_of(TrainOptions), *extra_options(spec))
        problems = Problems()
        values = convert_values(raw, {entry.name: entry for entry in entries}, lambda name: f"{file}: {name}", problems)
        problems.raise_if_any()
        explicit = frozenset({"activation_checkpointing"}) & values.keys()  # stored only if it was set
        return cls(path, replace(build_options(values, spec, explicit), run_dir=str(path)), entries)

    def differences(self, options: TrainOptions, names: frozenset[str] | None = None) -> dict[str, tuple[Any, Any]]:
        """Compare this run's options with ``options``, and return both values of each option that differs.

        The result maps the option's name to the value in this run and the value in ``options``. Options that do not affect
        results are ignored. If ``names`` is set, only the options in ``names`` are compared.
        """
        checked = [e for e in self.entries if e.info.changes_results and (names is None or e.name in names)]
        old, new = ([stored_value(e, value_of(one, e.name)) for e in checked] for one in (self.options, options))
        return {e.name: (a, b) for e, a, b in zip(checked, old, new, strict=True) if a != b}


def value_of(options: TrainOptions, name: str) -> Any:
    """Return the value of a built-in option or of an option that the algorithm declares."""
    return options.extra[name] if name in options.extra else getattr(options, name, None)


def _named_run(options: TrainOptions, path: Path) -> StoredRun:
    if not path.is_dir():
        raise UsageError(f"--resume directory does not exist: {path}; pass the run directory (runs/<name>)")
    if not is_run(path):
        inner = next((parent for parent in path.absolute().parents if is_run(parent)), None)
        hint = f"did you mean {inner}?" if inner else "pass the directory that contains config.yaml (runs/<name>)"
        raise UsageError(f"--resume {path} is not a run directory; {hint}")
    if options.run_dir and Path(options.run_dir).absolute() != path.absolute():
        raise UsageError(f"--resume {path} and --run-dir {options.run_dir} are different directories; remove --run-dir")
    return StoredRun.read(path)


def _newest_run(options: TrainOptions) -> StoredRun:
    root = Path(options.run_dir) if options.run_dir else RUNS_ROOT
    runs = []
    for path in root.iterdir() if root.is_dir() else ():
        with suppress(UsageError):  # written by another version, or with an algorithm that no longer exists
            if is_run(path):
                runs.append(StoredRun.read(path))
    runs.sort(key=_last_activity, reverse=True)
    if not runs:
        raise UsageError(f"--resume found no run in {root}/; pass --resume PATH, or omit --resume to start a new run")
    # Without --ckpt the command line is not a complete configuration; then only explicit options are compared.
    compared = None if "ckpt" in options.explicit else options.explicit
    for run in runs:
        if not run.differences(options, compared):
            return run
    name, (old, new) = next(iter(runs[0].differences(options, compared).items()))
    raise UsageError(
        f"--resume found no run with the same configuration in {root}/ (checked runs: {len(runs)}; {runs[0].path} "
        f"has {flag_of(name)} {old} instead of {new}); pass --resume PATH, or omit --resume to start a new run"
    )


def _last_activity(run: StoredRun) -> tuple[bool, float]:
    """Return a sort key: whether the run has checkpoints, and the time of the last write to its directory (Unix seconds)."""
    times = [0.0]
    for entry in (run.path, *run.path.iterdir()):
        with suppress(OSError):  # a dangling link, or a file that was deleted meanwhile
            times.append(entry.stat().st_mtime)
    return bool(CheckpointFolder(run.options.checkpoint_path).steps()), max(times)


def _continue(options: TrainOptions, run: StoredRun) -> TrainOptions:
    Problems.raise_all(
        f"{flag_of(name)} {new} differs from {old} in {run.path}, and would change the run's results; remove the option, or "
        "start a new run without --resume"
        for name, (old, new) in run.differences(options, options.explicit).items()
    )
    core = {entry.name for entry in options_of(TrainOptions)}
    changes: dict[str, Any] = {name: getattr(options, name) for name in options.explicit & core}
    changes |= {"explicit": options.explicit | run.options.explicit, "run_dir": str(run.path), "resume": str(run.path)}
    changes["extra"] = run.options.extra | {name: options.extra[name] for name in options.explicit - core}
    merged = replace(run.options, **changes)
    _check_step(merged)
    return merged


def _check_step(options: TrainOptions) -> None:
    step, root = options.resume_step, options.checkpoint_path
    if step is None:
        return
    folder = CheckpointFolder(root)
    steps = set(folder.steps())
    with suppress(CheckpointError):  # a damaged best checkpoint cannot be chosen
        steps |= {best} if (best := folder.best_step()) is not None else set()
    if step not in steps:
        remedy = (
            f"choose one of {', '.join(map(str, sorted(steps)))}"
            if steps
            else "omit the option, because the folder has no checkpoints"
        )
        raise UsageError(f"--resume-step {step}: {root} has no checkpoint of this step; {remedy}")
