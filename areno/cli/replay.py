"""``areno replay``: trains again on the recorded rows of a step, and compares the statistics with those of the run.

Nothing is generated.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import EXPERIMENT, is_experiment, is_run
from areno.training.stopping import StopRequested

_USAGE = """areno replay RUN --step N [--updates K] [--out DIR] [options of areno train]
       areno replay RUN --step N [--updates K] [--out DIR] [key=value ...]    for a run of areno run"""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno replay",
        usage=_USAGE,
        description="Train again on the rows that a run recorded in a step, and compare the statistics with those "
        "of the run. You can change options of the loss, the advantages or the optimizer, such as --lr 1e-6. If the run "
        "saved all rows of the step (--save-rollouts), the replay uses these rows. Otherwise, the replay uses the samples in "
        "samples.jsonl, which are only some of the rows. The replay starts from the newest checkpoint before "
        "the step, or else from the initial model. Nothing is generated, and nothing is written to the run directory.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="The run directory.")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="The step, as numbered in metrics.jsonl.")
    parser.add_argument(
        "--updates", type=int, default=1, metavar="K", help="Train K times on the recorded rows (default: 1)."
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="Save the replay, including a checkpoint of the trained model, in this new run directory.",
    )
    arguments, changes = parser.parse_known_args(argv)
    path = Path(arguments.run).expanduser()
    if not is_run(path):
        raise UsageError(
            f"{path} is not a run directory; pass the folder that contains config.yaml (runs/<name>) as the "
            "first argument: areno replay RUN --step 12"
        )
    for name, least in (("step", 0), ("updates", 1)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    if arguments.out and Path(arguments.out).expanduser().exists():
        raise UsageError(f"--out {arguments.out} already exists; choose a new directory")
    with tempfile.TemporaryDirectory(prefix="areno-replay-") as scratch:
        out = Path(arguments.out).expanduser() if arguments.out else Path(scratch) / "replay"
        kind = _of_experiment if is_experiment(path, "areno replay") else _of_run
        try:
            replayed = kind(path, arguments, out, changes)
        except StopRequested as stop:
            return 128 + stop.signum
    recorded = [record for record in RunDirectory(path).read_metrics() if record["step"] == arguments.step]
    _print(_table({name: value for record in recorded for name, value in record.items()}, replayed))
    if arguments.out:
        print(f"\nkept in {out}")
    return 0


def _of_run(path: Path, arguments: Namespace, out: Path, changes: Sequence[str]) -> list[dict[str, Any]]:
    from areno.config.replayed import replay_options

    options = replay_options(path, changes, out)
    from areno.api.replay import prepared, run_replay
    from areno.training.replay import find_replay

    temperature = options.recorded.temperature
    replay = prepared(options, find_replay(RunDirectory(path), arguments.step, arguments.updates, temperature))
    _print([*replay.described(str(options.replayed.ckpt)), *(f"changed: {change}" for change in options.changes)])
    return run_replay(options.replayed, replay, keeps=bool(arguments.out))


def _of_experiment(path: Path, arguments: Namespace, out: Path, changes: Sequence[str]) -> list[dict[str, Any]]:
    from areno.experiments.replay import prepared, replay_config, run_replay
    from areno.training.replay import find_replay

    recorded, config = replay_config(path, changes, out, keeps=bool(arguments.out))
    temperature = config.gconfig.temperature
    replay = find_replay(RunDirectory(path, EXPERIMENT), arguments.step, arguments.updates, temperature)
    replay = prepared(recorded, config, replay)
    _print([*replay.described(config.actor.path), *(f"changed: {change}" for change in changes)])
    return run_replay(config, replay)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _table(recorded: Mapping[str, Any], replayed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with one statistic per line.

    The columns are the recorded value, the values of the first and the last update, and the last minus the recorded value.
    """
    from areno.training.replay import compared

    last = compared(recorded, replayed[-1])
    first = compared(recorded, replayed[0])
    titles = ["replayed"] if len(replayed) == 1 else ["update 1", f"update {len(replayed)}"]
    width = max(map(len, last), default=0)
    yield ""
    yield f"{'statistic':<{width}}" + "".join(f"{title:>15}" for title in ("recorded", *titles, "difference"))
    for name, (before, after) in last.items():
        shown = [after] if len(replayed) == 1 else [first[name][1] if name in first else None, after]
        difference = "" if before is None else "0" if after == before else f"{after - before:+.4g}"
        columns = "".join(f"{_text(value):>15}" for value in (before, *shown))
        yield f"{name:<{width}}{columns}{difference:>15}".rstrip()


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
