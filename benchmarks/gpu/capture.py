"""Graphs are captured, dropped and captured again; a failed capture leaves the thread where it was; what graphs hold."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
from typing import Any

from shared import Checks, Report, answers, attempt, half, random_module, rollout_loop, run_stage, step_counts

import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.paged.capture import CaptureError, GraphSet
from areno.engine.rollout.paged.graphs import DeviceDecode, bucket_sizes
from areno.types import Request, SamplingParams

MIB = 2**20


def asked(count: int, tiny: bool) -> list[Request]:
    """Requests of different lengths, so that several batch sizes occur."""
    most = 12 if tiny else 60
    return [
        Request([5 + i] * 20, SamplingParams(greedy=True, max_new_tokens=most - i % (most // 2), ignore_eos=True), [i])
        for i in range(count)
    ]


def rounds(args: argparse.Namespace, checks: Checks, report: Report, model: Any) -> None:
    """Rollouts with all that may drop graphs in between; each must be replayed, and say the same."""
    loop = rollout_loop(model, max_running=16, budget_tokens=8192)
    requests, said = asked(16, args.tiny), []

    def again(name: str) -> None:
        before = step_counts(loop)
        said.append([sample.resp_tokens for result in answers(loop.submit, requests) for sample in result.sequences])
        loop.wait_idle()
        checks.replayed(name, loop, before)
        report.add("rounds", {"round": name, "graphs": len(loop.device_decode._graphs), "epoch": loop.cache.epoch})

    again("first")
    again("same graphs")
    checks.below(
        "graphs that the second round captured", report["rounds"][1]["graphs"] - report["rounds"][0]["graphs"], 0
    )
    loop.drop_cache()
    again("after the cache was dropped")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0)
    loop.weights_changed(1)
    again("after an update in place")
    for parameter in model.module.parameters():
        parameter.data = parameter.data.clone()
    loop.weights_changed(2)
    again("after weights have moved")
    checks.true("all rounds gave the same tokens", all(one == said[0] for one in said))
    loop.close()


def failed_capture(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    """A program that reads a number from the device cannot be captured; the warm-up finds out, and names it."""
    graphs = GraphSet(torch.device(args.device))
    value, before = torch.ones(8, device=args.device), torch.cuda.current_stream()
    try:
        graphs.capture(1, lambda: value.add_(value.sum().item()))
        checks.true("a program with a host sync is refused", False)
    except CaptureError as error:
        report["refused because"] = str(error)
    checks.true("the thread is on the stream that it was on", torch.cuda.current_stream() == before)
    graphs.capture(1, lambda: value.mul_(2))
    value.fill_(1)
    graphs[1].replay()
    checks.below("difference of a replay after a failed capture", float((value - 2).abs().max()), 0)


def memory_of_graphs(args: argparse.Namespace, report: Report, model: Any, most: int) -> None:
    """Memory that the graphs of all batch sizes hold, captured from the smallest or from the largest on."""
    for order in ("largest first", "smallest first"):
        loop = rollout_loop(model, max_running=most, budget_tokens=most * 128)
        answers(loop.submit, asked(1, args.tiny))
        loop.wait_idle()
        device: DeviceDecode = loop.device_decode
        device.release()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        sizes = sorted(bucket_sizes(most), reverse=order == "largest first")
        with torch.inference_mode():
            done = sum(device._capture(size) for size in sizes)
        torch.cuda.empty_cache()
        held = (torch.cuda.memory_reserved() - before) / MIB
        report.add("graph_memory", {"order": order, "sizes": len(sizes), "captured": done, "mib": round(held, 1)})
        loop.close()


def dead_pool(args: argparse.Namespace, report: Report) -> None:
    """Whether this PyTorch captures into a pool whose graphs are gone; last, because it may leave the device unusable."""
    value, graph = torch.ones(8, device=args.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value * 2
    pool = graph.pool()
    del graph
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            value * 2
        report["capture into a dead pool"] = "accepted"
    except RuntimeError as error:
        report["capture into a dead pool"] = str(error).splitlines()[0][:200]


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    model = prepare(random_module(args, half(args.device)), "random")
    attempt(report, checks, "rounds", lambda: rounds(args, checks, report, model))
    if not args.device.startswith("cuda"):
        report["skipped"] = "failed captures, and the memory of graphs: there is no CUDA"
        return
    attempt(report, checks, "failed capture", lambda: failed_capture(args, checks, report))
    attempt(report, checks, "graph memory", lambda: memory_of_graphs(args, report, model, 16 if args.tiny else 256))
    attempt(report, checks, "dead pool", lambda: dead_pool(args, report))


if __name__ == "__main__":
    run_stage("capture", stage)
