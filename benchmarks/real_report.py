"""Summarizes the processes of ``real_model.py``: medians, ratios, shares of the machine's limit, and tables."""

from __future__ import annotations

import time
from typing import Any

import limits
from common import median
from real_parts import PARTS
from rollout import check_sampling, combine


def probe(threads: int) -> float:
    """Current GFLOP/s of a matrix product, measured for 0.2 s: shows whether the machine was busy with something else."""
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(2, 1024, 1024)
    best, ends = float("inf"), time.perf_counter() + 0.2
    while (began := time.perf_counter()) < ends:
        torch.mm(left, right)
        best = min(best, time.perf_counter() - began)
    return round(2 * 1024**3 / best / 1e9, 1)


def summarize(runs: list[dict[str, Any]], shape: limits.Shape) -> dict[str, Any]:
    """Summary of every part that has runs, in the order of ``PARTS``."""
    parts = {}
    for name in PARTS:
        own = [run for run in runs if run["described"]["part"] == name]
        if own:
            parts[name] = _part(name, own, shape)
    return parts


def _part(name: str, runs: list[dict[str, Any]], shape: limits.Shape) -> dict[str, Any]:
    results: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if "result" in run:
            results.setdefault(run["described"]["side"], []).append(run["result"])
    measured = results.pop("limit", [])
    part = {
        "workload": runs[0]["described"]["workload"],
        "prompt_tokens": round(sum(lengths := runs[0]["lengths"]["prompt_tokens"]) / len(lengths), 1),
        "failed": {run["described"]["side"]: run["failed"] for run in runs if "failed" in run},
    }
    if PARTS[name].trains:
        sides = {side: _steps(each) for side, each in results.items()}
    else:
        tokens = part["workload"]["prompts"] * part["workload"]["samples"] * part["workload"]["new_tokens"]
        sides = {side: combine(each, tokens) for side, each in results.items()}
    for side, row in sides.items():
        row["commits"] = sorted({run["commit"] for run in runs if run["described"]["side"] == side})
        row["gflops_before"] = [run["gflops_before"] for run in runs if run["described"]["side"] == side]
    if measured:
        part["limit"] = _limit(name, runs[0], measured, shape)
        for row in sides.values():
            row["share_of_limit"] = {
                key: round(part["limit"][key] / row[key], 4) for key in _TIMES if row.get(key) and key in part["limit"]
            }
    return part | {"sides": sides, "areno_over": _ratios(sides)}


_TIMES = ("step_s", "rollout_s", "train_s", "seconds")


def _steps(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the counted steps of all processes of a side."""
    seconds = [value for result in results for value in result["seconds"]]
    split = {part: median([v for r in results for v in r["split"][part]]) for part in sorted(results[0]["split"])}
    row: dict[str, Any] = {"how": results[0]["how"], "step_s": median(seconds)}
    row["step_s_of_each_run"] = [median(result["seconds"]) for result in results]
    row |= {"split_s": split, "rollout_s": split.get("rollout", split.get("rollout_and_reward"))}
    row["train_s"] = split.get("train", round(row["step_s"] - (row["rollout_s"] or 0.0), 4))
    row["peak_mib"] = round(max(result["peak_mib"] for result in results), 1)
    row["over_base_mib"] = round(max(result["peak_mib"] - result["base_mib"] for result in results), 1)
    row |= {"response_len": results[0]["response_len"], "seq_len": median([result["seq_len"] for result in results])}
    return row


def check(name: str, part: dict[str, Any]) -> None:
    """Check that all sides did the same work.

    Raises:
        AssertionError: mean lengths of rows differ by more than what a template adds after an answer, or mean log-probs of
            the samples differ by more than chance, if each sample of a real model counts as one draw.
    """
    sides, work = part["sides"], part["workload"]
    if PARTS[name].trains:
        means = {side: row["seq_len"] for side, row in sides.items()}
        same = not means or max(means.values()) <= 1.02 * min(means.values()) + 2
        assert same, f"{name}: the sides have rows of other mean lengths: {means}"
    elif sides:
        check_sampling({side: [row] for side, row in sides.items()}, work["prompts"] * work["samples"])


def _limit(name: str, run: dict[str, Any], measured: list[dict[str, Any]], shape: limits.Shape) -> dict[str, Any]:
    """Minimum seconds of the matrix products of a step or pass at the measured rates; prompts are computed once."""
    work, lengths = run["described"]["workload"], run["lengths"]
    rate = 1e9 * max(result["gemm_gflops"] for result in measured)
    limit: dict[str, Any] = {"how": measured[0]["how"], "gemm_gflops": round(rate / 1e9, 1)}
    counts = (lengths["prompt_tokens"], work["samples"], lengths["answers"])
    if PARTS[name].trains:
        limit["train_s"] = round(limits.train_flop(shape, *counts) / rate, 4)
    rollout = 0.0
    if PARTS[name].algo != "sft":
        products = min(result["products_s"] for result in measured)
        prefill = limits.phases(shape, *counts, 4)[0]
        rollout = prefill.flop / rate + (work["new_tokens"] - 1) * products
        limit |= {"products_of_a_decode_step_s": round(products, 5)}
        limit["rollout_s" if PARTS[name].trains else "seconds"] = round(rollout, 4)
        limit["tokens_per_s"] = round(work["prompts"] * work["samples"] * work["new_tokens"] / rollout, 1)
    if PARTS[name].trains:
        limit["step_s"] = round(limit["train_s"] + rollout, 4)
    return limit


def _ratios(sides: dict[str, Any]) -> dict[str, Any]:
    """How many times faster each side of the current areno is than the others, and its memory over theirs."""
    ours = [name for name in sides if name.startswith("areno")]
    return {
        own: {
            other: {
                **{key: round(row[key] / sides[own][key], 2) for key in _TIMES if row.get(key) and sides[own].get(key)},
                "memory": round(sides[own]["peak_mib"] / row["peak_mib"], 3),
            }
            for other, row in sides.items()
            if other != own
        }
        for own in ours
    }


def show(name: str, part: dict[str, Any]) -> None:
    """Print the table of one part."""
    work, limit = part["workload"], part.get("limit", {})
    shape = (
        f"{work['prompts']} prompts of {part['prompt_tokens']:.0f} tokens x {work['samples']} x {work['new_tokens']}"
    )
    trains = PARTS[name].trains
    titles = ("step s", "rollout s", "train s") if trains else ("tok/s", "seconds", "compile s")
    keys = ("step_s", "rollout_s", "train_s") if trains else ("tokens_per_s", "seconds", "compile_s")
    first = next(iter(part["areno_over"]), "")
    print(f"\n{name}: {shape}")
    print(
        f"  {'':<18}" + "".join(f"{title:>11}" for title in titles) + f"{'of limit':>10}{'MiB':>9}{first + ' is':>18}"
    )
    for side, row in part["sides"].items():
        share = row.get("share_of_limit", {}).get("step_s" if trains else "seconds")
        over = part["areno_over"].get(first, {}).get(side)
        ratio = f"{over['step_s' if trains else 'seconds']:.2f} x" if over else ""
        cells = "".join(f"{row[key]:>11,.2f}" if row[key] is not None else f"{'':>11}" for key in keys)
        print(f"  {side:<18}{cells}{f'{share:.1%}' if share else '':>10}{row['peak_mib']:>9,.0f}{ratio:>18}")
    cells = "".join(f"{limit[key]:>11,.2f}" if key in limit else f"{'':>11}" for key in keys)
    print(f"  {'limit':<18}{cells}" if limit else "  no limit was measured", flush=True)
    for side, error in part["failed"].items():
        print(f"  {side:<18} failed: {error.strip().splitlines()[-1]}")
