"""Is what the device computes right: the engine against stock `transformers`, pages against slots, graphs against eager
steps, the training forward in bf16 against fp32."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Iterator
from typing import Any

from shared import Checks, Report, attempt, random_module, run_stage

import torch
from torch import Tensor, nn

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.types import Request, RolloutSequence, SamplingParams
from tests.support.tiny import VOCAB, tiny_module

FAMILIES = ("llama", "qwen2", "gemma3", "gpt_oss", "qwen3_5")
SYNCHRONIZES_IN_FP32 = {"gpt_oss"}  # PyTorch's grouped matmul does, so nothing is captured; in bf16 it does not
Sample = tuple[list[int], RolloutSequence]


def requests(count: int, vocab: int, new: int, greedy: bool | None = None) -> list[Request]:
    """Prompts of 1 to 300 tokens with one to three samples; greedy, sampled, or (None) both in turn."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 7, 16, 40, 300]))]
        is_greedy = i % 2 == 0 if greedy is None else greedy
        sampling = SamplingParams(
            greedy=is_greedy, temperature=0.8, max_new_tokens=rng.randint(1, new), ignore_eos=True
        )
        made.append(Request(prompt, sampling, [100 * i + k for k in range(1 + i % 3)]))
    return made


def generate(model: CausalLM, kind: type, asked: list[Request], **options: Any) -> tuple[list[Sample], RolloutLoop]:
    """Prompt and answer of every sample."""
    settings = {"eos_ids": frozenset(), "tokenizer": None, "budget_tokens": 65_536, "max_running": 32, **options}
    loop = kind(model, **settings)
    futures = loop.submit(asked)
    pairs = zip(asked, [future.result(timeout=300) for future in futures], strict=True)
    samples = [(request.prompt_tokens, sample) for request, result in pairs for sample in result.sequences]
    loop.close()
    return samples, loop


@torch.no_grad()
def against_stock(stock: nn.Module, samples: list[Sample], temperatures: list[float]) -> tuple[float, float, float]:
    """Teacher-forced by the stock model: how far a greedy token is from the best one, worst and mean log-prob gap."""
    behind, gaps = 0.0, []
    for (_, sample), temperature, logits in zip(samples, temperatures, stock_logits(stock, samples), strict=True):
        chosen = torch.tensor(sample.resp_tokens, device=logits.device)[:, None]
        if temperature == 0:
            behind = max(behind, float((logits.amax(-1) - logits.gather(-1, chosen)[:, 0]).max()))
        expected = (logits / (temperature or 1.0)).log_softmax(-1).gather(-1, chosen)[:, 0]
        gaps.append((expected - torch.tensor(sample.resp_logprobs, device=logits.device)).abs())
    every = torch.cat(gaps)
    return behind, float(every.max()), float(every.mean())


@torch.no_grad()
def stock_logits(stock: nn.Module, samples: list[Sample]) -> Iterator[Tensor]:
    """Logits [tokens, vocabulary] of the stock model for each sample's response, in fp32."""
    device = next(stock.parameters()).device
    for prompt, sample in samples:
        ids = torch.tensor([prompt + sample.resp_tokens], device=device)
        yield stock(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


@torch.no_grad()
def rounding(exact: nn.Module, rounded: nn.Module, samples: list[Sample], temperature: float) -> float:
    """Mean difference of the responses' log-probs between two stock models of the same weights, one of them in bf16."""
    gaps = []
    for (_, sample), one, other in zip(
        samples, stock_logits(exact, samples), stock_logits(rounded, samples), strict=True
    ):
        chosen = torch.tensor(sample.resp_tokens, device=one.device)[:, None]
        one, other = ((logits / temperature).log_softmax(-1).gather(-1, chosen)[:, 0] for logits in (one, other))
        gaps.append((one - other).abs())
    return float(torch.cat(gaps).mean())


def check_family(args: argparse.Namespace, checks: Checks, family: str) -> None:
    """In fp32 on a tiny model: everything must agree to rounding."""
    module = tiny_module(family, layers=2).to(args.device)
    stock, model = copy.deepcopy(module), prepare(module, family)
    asked = requests(6 if args.tiny else 16, VOCAB, 12 if args.tiny else 40)
    samples, loop = generate(model, PagedRolloutLoop, asked)
    temperatures = [0.0 if r.sampling.greedy else r.sampling.temperature for r in asked for _ in r.seeds]
    behind, worst, _ = against_stock(stock, samples, temperatures)
    checks.below(f"{family}: logits that a greedy token lies behind the best of transformers", behind, 1e-3)
    checks.below(f"{family}: engine log-probs against transformers", worst, 1e-4)
    slots, _ = generate(model, RolloutLoop, asked)
    checks.below(f"{family}: samples that differ between pages and slots", differing(samples, slots), 0)
    if args.device.startswith("cuda"):
        eager, _ = generate(model, PagedRolloutLoop, asked, eager_decode=True)
        checks.below(f"{family}: samples that differ between graphs and eager steps", differing(samples, eager), 0)
        if family not in SYNCHRONIZES_IN_FP32:
            checks.replayed(family, loop)


def differing(a: list[Sample], b: list[Sample]) -> int:
    return sum(x[1].resp_tokens != y[1].resp_tokens for x, y in zip(a, b, strict=True))


def check_half(args: argparse.Namespace, checks: Checks, report: Report, name: str, exact: nn.Module) -> None:
    """A model in bf16: rollout against `transformers` in fp32, and against the training forward; then the gradients."""
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())  # the same weights, computed with in fp32
    stock = copy.deepcopy(rounded)
    model = prepare(rounded, name)
    vocab = min(exact.config.get_text_config().vocab_size, 500)
    asked = requests(4 if args.tiny else 24, vocab - 1, 10 if args.tiny else 100, greedy=False)
    samples, loop = generate(model, PagedRolloutLoop, asked)
    _, worst, mean = against_stock(exact, samples, [0.8] * len(samples))
    stock_mean = rounding(exact, stock, samples, 0.8)
    report[f"{name}: bf16 rollout against fp32"] = {"mean": mean, "max": worst, "transformers_mean": stock_mean}
    checks.below(
        f"{name}: error of bf16 rollout log-probs, relative to that of transformers in bf16 (both against fp32)",
        mean / stock_mean,
        1.25,
    )
    checks.replayed(f"{name} in bf16", loop)
    rows = [prompt + sample.resp_tokens for prompt, sample in samples]
    scored = score(model, rows, 0.8)
    reported = torch.cat([torch.tensor(sample.resp_logprobs) for _, sample in samples])
    trained = torch.cat([row[len(p) :] for row, (p, _) in zip(scored, samples, strict=True)])
    gap = (trained.cpu() - reported).abs()
    report[f"{name}: bf16 rollout against the training forward"] = {"mean": float(gap.mean()), "max": float(gap.max())}
    # With experts, rounding changes some choices, in the rollout as in transformers; replayed routing would prevent this.
    bound = min(max(2e-2, stock_mean), 0.1)
    checks.below(f"{name}: bf16 rollout log-probs against the training forward, mean", float(gap.mean()), bound)
    check_gradients(checks, name, rows[:8], model, prepare(exact, name), stock)


@torch.no_grad()
def score(model: CausalLM, rows: list[list[int]], temperature: float) -> list[Tensor]:
    """Log-prob of each token of each row in one packed forward pass; entry 0 is 0."""
    plan = PackedPlan([len(row) for row in rows], model.device)
    ids = torch.tensor([token for row in rows for token in row], device=model.device)
    hidden = model.body(ids, plan.position_ids, plan)
    out = model.logprobs(hidden[:-1], ids[1:], torch.full((len(ids) - 1,), temperature, device=model.device))
    return list(torch.cat([out.new_zeros(1), out]).split([len(row) for row in rows]))


def check_gradients(
    checks: Checks, name: str, rows: list[list[int]], rounded: CausalLM, whole: CausalLM, stock: nn.Module
) -> None:
    """Direction of the gradient of the mean log-prob of packed rows: bf16 through the fused kernel, and stock `transformers`
    in bf16, against fp32."""
    gradients = [packed_gradient(model, rows) for model in (rounded, whole)]
    checks.below(f"{name}: parameters without a gradient", len(gradients[1].keys() ^ gradients[0].keys()), 0)
    cosines = {
        parameter: float(torch.cosine_similarity(gradients[0][parameter].flatten(), own.flatten(), dim=0))
        for parameter, own in gradients[1].items()
    }
    worst = min(cosines, key=lambda parameter: cosines[parameter])
    distance, unavoidable = (between(side, gradients[1]) for side in (gradients[0], stock_gradient(stock, rows)))
    checks.below(
        f"{name}: 1 - cosine of the whole gradient, bf16 and fp32", distance, min(max(1e-2, 1.5 * unavoidable), 0.1)
    )
    checks.below(f"{name}: 1 - cosine of the worst parameter ({worst})", 1 - cosines[worst], 0.15)


def packed_gradient(model: CausalLM, rows: list[list[int]]) -> dict[str, Tensor]:
    """Gradient of the mean log-prob of the packed rows' tokens, by parameter."""
    plan = PackedPlan([len(row) for row in rows], model.device)
    ids = torch.tensor([token for row in rows for token in row], device=model.device)
    hidden = model.body(ids, plan.position_ids, plan)
    model.logprobs(hidden[:-1], ids[1:], torch.ones(len(ids) - 1, device=model.device)).mean().backward()
    return {name: p.grad.float() for name, p in model.parameters() if p.grad is not None}


def stock_gradient(stock: nn.Module, rows: list[list[int]]) -> dict[str, Tensor]:
    """The same gradient from the stock model, row by row."""
    device = next(stock.parameters()).device
    ids = torch.tensor([token for row in rows for token in row], device=device)
    logits = torch.cat(
        [stock(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0].float() for row in rows]
    )
    logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).mean().backward()
    return {name: p.grad.float() for name, p in stock.named_parameters() if p.grad is not None}


def between(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """1 - cosine of two gradients, in float64."""
    flat = [torch.cat([side[name].flatten().double() for name in other]) for side in (one, other)]
    return 1 - float(torch.cosine_similarity(*flat, dim=0))


def family_module(args: argparse.Namespace, family: str) -> nn.Module:
    """A model of a family that is large enough for bf16 kernels."""
    sizes = {"hidden": 32, "heads": 2} if args.tiny else {"hidden": 512, "heads": 8}
    return tiny_module(family, layers=2, **sizes).to(args.device)


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    for family in FAMILIES[: 1 if args.tiny else None]:
        exact = family_module(args, family)
        attempt(report, checks, f"{family} in bf16", lambda f=family, e=exact: check_half(args, checks, report, f, e))
    if not args.tiny:
        attempt(report, checks, "0.6B in bf16", lambda: whole_model(args, checks, report))
    for family in FAMILIES[: 1 if args.tiny else None]:
        attempt(report, checks, family, lambda f=family: check_family(args, checks, f))


def whole_model(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    check_half(args, checks, report, "0.6B", random_module(args, torch.float32))


if __name__ == "__main__":
    run_stage("correctness", stage)
