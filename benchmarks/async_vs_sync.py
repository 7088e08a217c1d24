"""Asynchronous against synchronous RL with episodes that wait for slow tools: same trainer, engine and work on both sides.

    python benchmarks/async_vs_sync.py                                # both parts, then one line of JSON
    python benchmarks/async_vs_sync.py --part speed --save NAME       # also that part of benchmarks/results/NAME.json
    python benchmarks/async_vs_sync.py --part learning --save NAME

An episode has 8 turns of a few tokens, each followed by a tool whose latency is log-normal (median 0.3 s, sigma 1.2, at
most 20 s; mean 0.6 s). Synchronous is ``max_head_offpolicyness=0``, asynchronous a larger value; nothing else differs: the
same prompts and samples per step, the same limit of concurrent groups, continuous batching, and the same latencies for each
group; ``speed`` has the decoupled loss on both sides. Each run is a fresh trainer process with one rollout process.

``speed`` measures seconds per step, from the end of one to the end of the next, without the first steps, and prints the
lower bound (see ``tool_latency.py``). There are two limits of concurrency. With as many groups as a batch has, a synchronous
step can use them all, and an asynchronous one gains only by not waiting for stragglers. With four batches, a synchronous
step cannot use more groups than before, because the next batch needs its weights; an asynchronous one can. Waiting for tools
costs nothing, so the limit must be large to keep processors busy.

``learning`` uses much shorter latencies, since at equal staleness they do not affect what is learned. It reports the final
reward on held-out prompts, mean staleness and time for several bounds of staleness, with the naive loss (old log-probs are
those of rollout) and the decoupled one (recomputed before the update). Seeds differ in data order and sampling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, machine, run_worker
from tool_latency import Latency, Work, bound, ideal_step

sys.path.insert(0, str(ROOT / "examples/experiments"))

import toy

WORKER = ROOT / "benchmarks/workers/async_steps.py"
TRAIN_PARTS = ("recompute_logp", "compute_advantage", "train_step", "update_weights")
LOSSES = ("naive", "decoupled")
ENV = {"PYTHONPATH": str(ROOT)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["speed", "learning", "both"], default="both")
    parser.add_argument("--batch", type=int, default=8, help="Prompts of a step.")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=4, help="Of each turn.")
    sides = ["async_4", "sync", "async_4_few", "async_1", "async_2", "async_8"]
    parser.add_argument("--sides", nargs="+", default=sides, help="Of `speed`; those left out are kept in the result.")
    parser.add_argument("--steps", type=int, default=10, help="Of a synchronous run; asynchronous ones have more.")
    parser.add_argument("--learning-steps", type=int, default=40)
    parser.add_argument("--learning-scale", type=float, default=0.05, help="Of the latencies of `learning`.")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--save", default="")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path, name: str, latency: Latency, **settings: Any) -> dict[str, Any]:
    """One run; ``settings`` are the worker's settings that differ between runs."""
    names = ("batch", "samples", "new_tokens", "lr")
    shared = {key: getattr(args, key) for key in names}
    drawn = {key: getattr(latency, key) for key in ("seed", "scale")}
    given = {"folder": str(folder), "name": name, "latency": drawn, "seed": latency.seed, **shared, **settings}
    return run_worker(sys.executable, WORKER, given, ENV, deadline_s=900)


def measured(found: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Seconds per counted step of a run, and how many of them training takes."""
    ends = found["ends"]
    train = [sum(parts) for parts in zip(*(found["parts"][p] for p in TRAIN_PARTS if p in found["parts"]), strict=True)]
    return {
        "step_s": round((ends[-1] - ends[warmup]) / (len(ends) - 1 - warmup), 3),
        "steps": len(ends) - 1 - warmup,
        "train_s": round(statistics.mean(train[warmup:]), 3),
        "staleness": round(statistics.mean(found["staleness"][warmup:]), 2),
    }


class Report:
    """The result, which is saved after each run, so that an interrupted benchmark keeps its runs and a later one adds to them.

    Runs with other settings are dropped, because they are not comparable.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = ("save", "part", "sides", "seeds", "staleness", "losses")
        self.settings = {key: value for key, value in vars(args).items() if key not in chosen}
        self.file = ROOT / "benchmarks/results" / f"{args.save}.json" if args.save else None
        known = json.loads(self.file.read_text()) if self.file is not None and self.file.exists() else {}
        self.content: dict[str, Any] = {"benchmark": "async_vs_sync"}
        if known.get("settings") == self.settings:
            self.content = known
        self.content |= {"settings": self.settings, "machine": machine()}

    def runs(self, part: str) -> dict[str, Any]:
        """Runs of a part, by name."""
        found: dict[str, Any] = self.content.setdefault(part, {})
        return found

    def keep(self, part: str, name: str, numbers: dict[str, Any]) -> None:
        """Add a completed run."""
        self.runs(part)[name] = {**numbers, "commit": self.content["machine"]["commit"]}
        self.write()

    def write(self) -> None:
        """Save the result, if ``--save`` is set."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def speed(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Seconds per step against the bound, by side."""
    latency = Latency()
    for name in args.sides:
        few = name.endswith("_few")
        ahead = 0 if name == "sync" else int(name.removeprefix("async_").removesuffix("_few"))
        concurrent, warmup = args.batch if few else 4 * args.batch, ahead + 2
        steps = args.steps + ahead if few or ahead == 0 else args.steps + 5 * min(ahead, 4)  # they are faster
        found = run(args, folder, name, latency, ahead=ahead, concurrent=concurrent, steps=steps, decoupled=True)
        side = measured(found, warmup)
        work = Work(batch=args.batch, concurrent=concurrent, ahead=ahead, train_s=side["train_s"])
        # A synchronous step uses exactly these groups; an asynchronous one those that have ended, so use the mean over all.
        begun = (steps + ahead + 1) * args.batch
        groups = [latency.of_group(number, args.samples) for number in range(begun)]
        counted = groups[warmup * args.batch : steps * args.batch] if ahead == 0 else groups
        least, ideal = bound(work, counted), ideal_step(work, groups, warmup, steps)
        side |= {"bound_s": round(least, 3), "ideal_s": round(ideal, 3), "over_bound": round(side["step_s"] / least, 3)}
        limits = {"max_head_offpolicyness": ahead, "max_concurrent_rollouts": concurrent}
        report.keep("speed", name, {**limits, **side})
        print(
            f"{name:12} {concurrent:4} at once {side['step_s']:7.2f} s/step, at least {least:6.2f} s "
            f"({side['over_bound']:.2f} times), by the rule of admission {ideal:6.2f} s; training {side['train_s']:.2f} s",
            flush=True,
        )
    sides = report.runs("speed")
    for name, side in sides.items():
        if name != "sync" and "sync" in sides:
            for key, seconds in (("times_faster", "step_s"), ("times_faster_by_bounds", "bound_s")):
                side[key] = round(sides["sync"][seconds] / side[seconds], 2)
            print(f"{name}: {side['times_faster']} times faster; the bounds say {side['times_faster_by_bounds']}")


def learning(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """What is learned, by staleness, loss and seed, and a table over the seeds."""
    for seed in args.seeds:
        for ahead, loss in itertools.product(args.staleness, args.losses):
            latency = Latency(seed=seed, scale=args.learning_scale)
            name = f"{ahead}-{loss}-{seed}"
            settings = {"ahead": ahead, "decoupled": loss == "decoupled", "concurrent": 4 * args.batch}
            found = run(args, folder, name.replace("-", "_"), latency, steps=args.learning_steps, **settings)
            side = measured(found, min(ahead + 2, args.learning_steps // 2))
            rewards = round(statistics.mean(found["rewards"]), 3)
            side |= {"final_reward": round(found["final_reward"], 3), "mean_reward": rewards}
            report.keep("learning", name, side)
            print(name, side, flush=True)
    report.content["table"] = table(report.runs("learning"))
    for line in report.content["table"]:
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """A line per staleness and loss: means over seeds, and the seconds per step of the first seed."""
    lines = []
    for cell in sorted({name.rpartition("-")[0] for name in runs}):
        found = [one for name, one in sorted(runs.items()) if name.rpartition("-")[0] == cell]
        means = {
            key: round(statistics.mean(one[key] for one in found), 3)
            for key in ("final_reward", "mean_reward", "staleness")
        }
        each = [one["final_reward"] for one in found]
        lines.append({"run": cell, **means, "step_s": found[0]["step_s"], "final_reward_of_each_seed": each})
    return lines


def main() -> None:
    args = arguments()
    parts = {"speed": speed, "learning": learning}
    report = Report(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        toy.make_toy(folder)
        for file, count, seed in (("train", 4096, 0), ("valid", 256, 1)):
            # One letter: with more, all runs first learn to repeat a single letter, and stay there for a while.
            rows = [row for row in toy.rows(count, seed) if row["letter"] == "a"]
            toy.write(folder / f"{file}.jsonl", ({key: row[key] for key in ("prompt", "letter")} for row in rows))
        for part in parts if args.part == "both" else [args.part]:
            parts[part](args, folder, report)
    report.write()
    print(json.dumps(report.content))


if __name__ == "__main__":
    main()
