"""Asynchronous against synchronous RL where episodes wait for slow tools: the same trainer, engine and work on both sides.

    python benchmarks/async_vs_sync.py                                # both parts, then one line of JSON
    python benchmarks/async_vs_sync.py --part speed --save NAME       # also that part of benchmarks/results/NAME.json
    python benchmarks/async_vs_sync.py --part learning --save NAME

An episode has 8 turns of a few tokens, each followed by a tool whose latency is log-normal (median 0.3 s, sigma 1.2, at
most 20 s; mean 0.6 s). Synchronous is ``max_head_offpolicyness=0``, asynchronous is more of it; nothing else differs: the
same prompts and samples per step, the same limit of concurrent groups, continuous batching, and the same drawn latencies,
group by group; ``speed`` has the decoupled loss on both sides. Each run is a fresh trainer process with one rollout process.

``speed`` counts seconds per step, from the end of one to the end of the next, without the first ones, and prints the least
that is possible (see ``tool_latency.py``). There are two limits of concurrency. As many groups as a batch has: a synchronous
step can use them all, and an asynchronous one gains only what it does not wait for stragglers. Four batches: a synchronous
step cannot use more of them than before, because the next batch needs its weights; an asynchronous one can. Tools that
wait cost nothing, so a limit that keeps processors busy is a large one.

``learning`` runs with latencies that are much shorter, since they do not matter to what is learnt at equal staleness: final
reward on held-out prompts, mean staleness and time for several bounds of staleness, with the naive loss (old log-probs are
those of rollout) and the decoupled one (recomputed before the update). Between seeds data order and sampling differ.
"""

from __future__ import annotations

import argparse
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
ENV = {"PYTHONPATH": str(ROOT)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["speed", "learning", "both"], default="both")
    parser.add_argument("--batch", type=int, default=8, help="Prompts of a step.")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=4, help="Of each turn.")
    parser.add_argument("--ahead", type=int, default=4, help="Staleness of the asynchronous side of `speed`.")
    parser.add_argument("--steps", type=int, default=10, help="Of a synchronous run; asynchronous ones have more.")
    parser.add_argument("--warmup", type=int, default=2, help="First steps that do not count; asynchronous: ahead + 2.")
    parser.add_argument("--learning-steps", type=int, default=60)
    parser.add_argument("--learning-scale", type=float, default=0.05, help="Of the latencies of `learning`.")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--save", default="")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path, name: str, latency: Latency, **settings: Any) -> dict[str, Any]:
    """One run; ``settings`` are those of the worker that differ between runs."""
    names = ("batch", "samples", "new_tokens", "lr")
    shared = {key: getattr(args, key) for key in names}
    drawn = {key: getattr(latency, key) for key in ("seed", "scale")}
    given = {"folder": str(folder), "name": name, "latency": drawn, "seed": latency.seed, **shared, **settings}
    return run_worker(sys.executable, WORKER, given, ENV, deadline_s=900)


def measured(found: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Seconds of a run's counted steps, and what training took of them."""
    ends = found["ends"]
    train = [sum(parts) for parts in zip(*(found["parts"][p] for p in TRAIN_PARTS if p in found["parts"]), strict=True)]
    return {
        "step_s": round((ends[-1] - ends[warmup]) / (len(ends) - 1 - warmup), 3),
        "steps": len(ends) - 1 - warmup,
        "train_s": round(statistics.mean(train[warmup:]), 3),
        "staleness": round(statistics.mean(found["staleness"][warmup:]), 2),
    }


def speed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per step against the bound."""
    latency, many, sides = Latency(), 4 * args.batch, {}
    plan = {
        "async": (args.ahead, many, 3 * args.steps, args.ahead + 2),
        "sync": (0, many, args.steps, args.warmup),
        "async_few": (args.ahead, args.batch, args.steps + args.ahead, args.ahead + 2),
    }
    for name, (ahead, concurrent, steps, warmup) in plan.items():
        found = run(args, folder, name, latency, ahead=ahead, concurrent=concurrent, steps=steps, decoupled=True)
        side = measured(found, warmup)
        work = Work(batch=args.batch, concurrent=concurrent, ahead=ahead, train_s=side["train_s"])
        # A synchronous step uses just these groups; an asynchronous one what has ended, so the mean over all is taken.
        first, last = warmup * args.batch, steps * args.batch
        begun = last + (ahead + 1) * args.batch
        groups = [latency.of_group(number, args.samples) for number in range(begun)]
        least = bound(work, groups[first:last] if ahead == 0 else groups)
        ideal = ideal_step(work, groups, warmup, steps)
        side |= {"bound_s": round(least, 3), "ideal_s": round(ideal, 3), "over_bound": round(side["step_s"] / least, 3)}
        sides[name] = {"max_head_offpolicyness": ahead, "max_concurrent_rollouts": concurrent, **side}
        print(
            f"{name:10} {concurrent:4} at once {side['step_s']:7.2f} s/step, at least {least:6.2f} s ({side['over_bound']:.2f}"
            f" times), by the rule of admission {ideal:6.2f} s; training {side['train_s']:.2f} s",
            flush=True,
        )
    sync = sides["sync"]
    for name in ("async", "async_few"):
        ratio = sync["step_s"] / sides[name]["step_s"]
        possible = sync["bound_s"] / sides[name]["bound_s"]
        sides[name] |= {"times_faster": round(ratio, 2), "times_faster_by_bounds": round(possible, 2)}
        print(f"{name}: {ratio:.2f} times faster than sync; the bounds say {possible:.2f}", flush=True)
    return sides


def learning(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A line per staleness and loss; seeds turn and turn about."""
    cells = [(ahead, decoupled) for ahead in args.staleness for decoupled in (False, True)]
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {cell: [] for cell in cells}
    table = []
    for seed in args.seeds:
        for ahead, decoupled in cells:
            latency = Latency(seed=seed, scale=args.learning_scale)
            name = f"learn-{ahead}-{decoupled}-{seed}"
            settings = {"ahead": ahead, "decoupled": decoupled, "concurrent": 4 * args.batch}
            found = run(args, folder, name, latency, steps=args.learning_steps, **settings)
            side = measured(found, min(ahead + 2, args.learning_steps // 2))
            runs[ahead, decoupled].append({**side, "final": found["final_reward"], "rewards": found["rewards"]})
            print(f"seed {seed} staleness {ahead} decoupled {decoupled}: {found['final_reward']:.3f}", flush=True)
    for (ahead, decoupled), found_all in runs.items():
        finals = [one["final"] for one in found_all]
        line = {
            "max_head_offpolicyness": ahead,
            "loss": "decoupled" if decoupled else "naive",
            "final_reward": round(statistics.mean(finals), 3),
            "final_reward_of_each_seed": [round(value, 3) for value in finals],
            "mean_reward": round(statistics.mean(value for one in found_all for value in one["rewards"]), 3),
            "staleness": round(statistics.mean(one["staleness"] for one in found_all), 2),
            "step_s": round(statistics.mean(one["step_s"] for one in found_all), 3),
        }
        table.append(line)
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    return table


def main() -> None:
    args = arguments()
    parts = {"speed": speed, "learning": learning}
    result = ROOT / "benchmarks/results" / f"{args.save}.json"
    report: dict[str, Any] = json.loads(result.read_text()) if args.save and result.exists() else {}
    report["benchmark"] = "async_vs_sync"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        toy.make_toy(folder)
        for file, count, seed in (("train", 4096, 0), ("valid", 256, 1)):
            # One letter: with more, all learn first to say always the same one, and stay there for a while.
            rows = [row for row in toy.rows(count, seed) if row["letter"] == "a"]
            toy.write(folder / f"{file}.jsonl", ({key: row[key] for key in ("prompt", "letter")} for row in rows))
        settings = {key: value for key, value in vars(args).items() if key not in ("save", "part")}
        for part in parts if args.part == "both" else [args.part]:
            facts = {"machine": machine(), "settings": settings}
            report[part] = {**facts, "sides": parts[part](args, folder)}
    if args.save:
        result.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
