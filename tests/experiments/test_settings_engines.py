"""Effects of the settings of optimizer, model and microbatches in small SFT and DPO runs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areno.config.experiment import DPOEngineConfig
from areno.config.experiment.machine import Machine
from areno.engine.engine import Engine
from areno.errors import UsageError
from areno.experiments.run_experiment import run_experiment
from areno.experiments.trainers import PPOTrainer
from areno.experiments.trainers.engines import engine_config, micro_batching, replica_stall_limit
from areno.experiments.trainers.supervised import preference_loss
from areno.reports.run_data import RunData
from areno.reports.verdict import verdict_of
from areno.types import TrainSequence
from tests.config.experiment.samples import rl
from tests.experiments.trainer_stage import PAIRS, Run, differ, run_kind, settings_of_kind, trainer_of
from tests.support.optimizer_states import contents
from tests.support.preferences import answer_logprobs
from tests.support.tiny import save_tiny_checkpoint


@pytest.fixture
def sft(tiny_checkpoint, tmp_path):
    """Runs SFT with settings by dotted name."""
    numbers = iter(range(1000))

    def run(changes: dict[str, Any] | None = None, **more: Any) -> Run:
        return run_kind("sft", tiny_checkpoint, tmp_path / str(next(numbers)), {**(changes or {}), **more})

    return run


SIX = {"total_train_steps": None, "total_train_epochs": 2}


# -- optimizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, [0.01] * 6),
        ({"lr": 0.5}, [0.5] * 6),
        ({"warmup_steps_proportion": 0.5}, [0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01, 0.01]),
        ({"lr_scheduler_type": "linear"}, [0.01 * (1 - k / 6) for k in range(1, 7)]),
        ({"lr_scheduler_type": "cosine"}, [0.005 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 7)]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.4}, [0.004 + 0.006 * (1 - k / 6) for k in range(1, 7)]),
    ],
)
def test_the_rate_follows_its_formula(sft, changes, rates):
    given = {f"actor.optimizer.{name}": value for name, value in changes.items()}
    assert sft({**SIX, **given}).column("sft/lr") == pytest.approx(rates)


def test_moments_can_be_stored_in_8_or_16_bits(sft):
    sizes = []
    for kind, dtype in (("adam", torch.float32), ("adam_8bit", torch.uint8), ("adam_bf16", torch.bfloat16)):
        run = sft({**SIX, "actor.optimizer.type": kind, "recover.mode": "auto", "recover.freq_steps": 6})
        (folder,) = run.checkpoints.glob("recover/step_000006/trainer_state/optimizer")
        tensors = [value for key, value in contents(folder).items() if key.startswith("state.")]
        sizes.append(sum(value.numel() * value.element_size() for value in tensors))
        assert dtype in {value.dtype for value in tensors}
        assert run.column("sft/loss")[-1] < run.column("sft/loss")[0]
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.6 * sizes[0]


def rows_of_steps(trainer: Any) -> list[list[TrainSequence]]:
    """A list that will hold the rows of each optimizer step of the following run."""
    steps, optimize = [], trainer.optimize
    trainer.optimize = lambda rows, *rest: steps.append(rows) or optimize(rows, *rest)
    return steps


def gradients(checkpoint, rows: list[TrainSequence], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the mean negative log-prob of the response tokens, by stock transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float64)
    model.load_state_dict(weights)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        tokens = torch.tensor(row.tokens)
        table = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
        for place, counts in enumerate(row.trainable()):
            if counts:
                total = total - table[place - 1, tokens[place]]
                count += 1
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


RULES: list[dict[str, Any]] = [
    {},
    {"lr": 0.002},
    {"weight_decay": 0.3},
    {"beta1": 0.3},
    {"beta2": 0.6},
    {"eps": 0.01},
    {"gradient_clipping": 0.05},
    {"type": "sgd", "lr": 0.3, "weight_decay": 0.1},
    {"type": "adam_bf16"},
]


@pytest.mark.parametrize("changes", RULES, ids=lambda rule: ",".join(rule) or "plain")
def test_two_steps_follow_the_written_out_optimizer_rule(tiny_checkpoint, tmp_path, changes):
    rule = {"type": "adam", "lr": 0.01, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | changes
    clip = changes.get("gradient_clipping", 1.0)
    given = {f"actor.optimizer.{name}": value for name, value in changes.items()}
    config = settings_of_kind("sft", tiny_checkpoint, tmp_path, {"actor.dtype": "float32", **given})
    with trainer_of(config) as trainer:
        batches = rows_of_steps(trainer)
        model = trainer.engine.actor.model.module
        weights = {name: value.detach().double().clone() for name, value in model.named_parameters()}
        trainer.train()
        ended = {name: value.detach().double() for name, value in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step, rows in enumerate(batches, 1):
        found = gradients(tiny_checkpoint, rows, weights)
        norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
        for name, gradient in found.items():
            g = gradient * min(1.0, clip / (norm + 1e-6))
            weights[name] = weights[name] * (1 - rule["lr"] * rule["weight_decay"])
            if rule["type"] == "sgd":
                weights[name] = weights[name] - rule["lr"] * g
                continue
            first[name] = rule["beta1"] * first[name] + (1 - rule["beta1"]) * g
            second[name] = rule["beta2"] * second[name] + (1 - rule["beta2"]) * g * g
            mean, square = first[name] / (1 - rule["beta1"] ** step), second[name] / (1 - rule["beta2"] ** step)
            weights[name] = weights[name] - rule["lr"] * mean / (square.sqrt() + rule["eps"])
    moved = torch.cat([(ended[name] - weights[name]).flatten() for name in found])
    start = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float64).state_dict()
    travelled = torch.cat([(weights[name] - start[name]).flatten() for name in found])
    # fp32 noise decides the direction of the few entries whose gradient is nearly zero.
    assert float(moved.norm()) < 0.01 * float(travelled.norm())


# -- the model -------------------------------------------------------------------------------------------------------


def test_path_and_init_from_scratch_say_where_weights_come_from(tiny_checkpoint, tmp_path):
    other = save_tiny_checkpoint(tmp_path / "other", seed=5)
    stored = {path: load_file(path / "model.safetensors") for path in (tiny_checkpoint, other)}
    name = "model.layers.0.mlp.up_proj.weight"

    def first(path: Any, **changes: Any) -> torch.Tensor:
        with trainer_of(
            settings_of_kind("sft", path, tmp_path / "x", {f"actor.{k}": v for k, v in changes.items()})
        ) as t:
            return t.engine.actor.model.module.state_dict()[name].clone()

    assert torch.equal(first(tiny_checkpoint), stored[tiny_checkpoint][name])
    assert torch.equal(first(other), stored[other][name])
    assert not torch.equal(first(other, init_from_scratch=True), stored[other][name])


def test_a_checkpoint_of_another_family_is_refused(tiny_checkpoint, tmp_path):
    config = settings_of_kind("sft", tiny_checkpoint, tmp_path, {"actor.model_type": "qwen3"})
    with pytest.raises(UsageError, match=r"actor\.model_type is 'qwen3'.*is a llama model"):
        run_experiment(config)
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "config.json").write_text("[]")
    config = settings_of_kind("sft", str(tmp_path / "listed"), tmp_path, {"actor.model_type": "qwen3"})
    with pytest.raises(UsageError, match=r"actor\.path .*config\.json is not a JSON object"):
        run_experiment(config)


def test_the_model_computes_in_dtype(sft):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        run = sft({"actor.dtype": dtype, "actor.optimizer.lr": 1e-6})
        assert {value.dtype for value in run.weights.values()} == {getattr(torch, dtype)}
        losses[dtype] = run.column("sft/loss")[0]
    assert losses["float32"] != losses["bfloat16"]
    assert losses["float32"] == pytest.approx(losses["bfloat16"], rel=0.05)


def test_overflows_of_fp16_are_no_failures(sft):
    """With a loss scale that is too large at first, updates are skipped until it fits; warnings and report do not mind."""
    run = sft(
        {
            "actor.dtype": "float16",
            "actor.optimizer.initial_loss_scale": 2.0**18,
            "actor.optimizer.hysteresis": 1,
            **SIX,
        }
    )
    skipped, scales = run.column("sft/update_skipped"), run.column("sft/loss_scale")
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert scales[-1] < scales[0]
    assert run.trainer.state.unusable is None
    data = RunData(run.folder)
    assert data.warnings == []
    assert "non_finite" not in [problem.key for problem in verdict_of(data).problems]


def test_attention_is_fused_or_eager(sft, monkeypatch):
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **more: calls.append(1) or fused(*given, **more),
    )
    losses = {}
    for name in ("sdpa", "eager"):
        calls.clear()
        losses[name] = sft({"actor.attn_impl": name}).column("sft/loss")[0]
        assert bool(calls) == (name == "sdpa")
    assert losses["sdpa"] == pytest.approx(losses["eager"], rel=1e-5)


@pytest.mark.parametrize("off", [False, True])
def test_training_never_applies_dropout(tmp_path, off):
    """With dropout rates of 0.5, the first loss is still that of the model without dropout."""
    checkpoint = save_tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    file = checkpoint / "config.json"
    drops = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    file.write_text(json.dumps(json.loads(file.read_text()) | drops))
    config = settings_of_kind("sft", checkpoint, tmp_path, {"actor.disable_dropout": off, "total_train_steps": 1})
    with trainer_of(config) as trainer:
        steps = rows_of_steps(trainer)
        trainer.train()
        loss = Run(trainer).column("sft/loss")[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    expected = []
    for row in steps[0]:
        tokens = torch.tensor(row.tokens)
        table = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
        expected += [
            -float(table[place - 1, tokens[place]].detach()) for place, counts in enumerate(row.trainable()) if counts
        ]
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_activation_checkpointing_stores_less_for_the_backward_pass(tiny_checkpoint, tmp_path):
    kept, losses = {}, {}
    for on in (False, True):
        counted = []

        def pack(value: torch.Tensor, counted: list[int] = counted) -> torch.Tensor:
            counted.append(value.numel())
            return value

        config = settings_of_kind("sft", tiny_checkpoint, tmp_path / str(on), {"actor.gradient_checkpointing": on})
        with trainer_of(config) as trainer, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            trainer.train()
            kept[on], losses[on] = sum(counted), Run(trainer).column("sft/loss")
    assert kept[True] < 0.7 * kept[False]
    assert losses[True] == pytest.approx(losses[False])


LORA = {"actor.use_lora": True}


def adapter_of(checkpoint, root, **changes: Any) -> tuple[dict[str, torch.Tensor], list[float], Engine]:
    given = {**LORA, **{f"actor.{name}": value for name, value in changes.items()}}
    run = run_kind("sft", checkpoint, root, given)
    trained = {name: value for name, value in run.weights.items() if "lora_" in name}
    return trained, run.column("sft/loss"), run.trainer.engine


def test_an_adapter_learns_on_frozen_weights(tiny_checkpoint, tmp_path):
    pytest.importorskip("peft")
    trained, losses, engine = adapter_of(tiny_checkpoint, tmp_path / "plain")
    stored = load_file(tiny_checkpoint / "model.safetensors")
    kept = {
        n.replace("base_model.model.", "").replace(".base_layer", ""): v
        for n, v in engine.actor.model.module.state_dict().items()
    }
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(kept[name], stored[name])
    assert {value.shape[0] for n, value in trained.items() if "lora_A" in n} == {32}
    assert len({n.rpartition(".lora_")[0] for n in trained}) == 2 * 7
    small, _, _ = adapter_of(tiny_checkpoint, tmp_path / "rank", lora_rank=4)
    assert {value.shape[0] for n, value in small.items() if "lora_A" in n} == {4}
    few, _, _ = adapter_of(tiny_checkpoint, tmp_path / "few", target_modules=["q_proj", "v_proj"])
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in few} == {"q_proj", "v_proj"}
    _, louder, _ = adapter_of(tiny_checkpoint, tmp_path / "alpha", lora_alpha=256)
    assert louder[0] == losses[0]  # an adapter starts at zero
    assert louder[1] != losses[1]


def test_an_adapter_learns_on_4_bit_weights(tiny_checkpoint, tmp_path):
    four_bit = pytest.importorskip("bitsandbytes").nn.Linear4bit
    _, losses, _ = adapter_of(tiny_checkpoint, tmp_path / "plain")
    trained, rounded, engine = adapter_of(tiny_checkpoint, tmp_path / "4bit", load_in_4bit=True)
    assert isinstance(engine.actor.model.module.get_submodule("model.layers.0.mlp.up_proj").base_layer, four_bit)
    assert all(bool(value.any()) for name, value in trained.items() if "lora_B" in name)
    assert rounded[0] != losses[0]
    assert rounded == pytest.approx(losses, rel=0.05)


def test_settings_reach_the_engines_of_training_and_rollout():
    config = rl(
        actor__dtype="float32",
        actor__use_lora=True,
        actor__load_in_4bit=True,
        actor__gradient_checkpointing=True,
        actor__offload_activations=True,
        actor__optimizer__offload=True,
        rollout__speculate=5,
    )
    trainer = object.__new__(PPOTrainer)
    trainer.config, trainer.machine = config, Machine()
    trains, (_, generates) = engine_config(config.actor), trainer.rollout_engine()
    assert {bool(engine.adapter and engine.adapter.load_in_4bit) for engine in (trains, generates)} == {True}
    assert (trains.activation_checkpointing, trains.offload_activations, trains.optimizer.offload) == (True, True, True)
    assert (trains.speculate, generates.speculate, generates.trains) == (0, 5, "nothing")


# -- microbatches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("request_timeout", "limit"), [(90, 90), (600, 600), (3600, 600), (7200, 1200)])
def test_a_longer_request_timeout_extends_the_time_that_a_replica_may_stall(request_timeout, limit):
    assert replica_stall_limit(request_timeout) == limit


def passes_of(checkpoint, root, rows: int = 4, **mb_spec: Any) -> tuple[list[list[int]], float]:
    """Number of tokens of each forward pass of the first step, and its loss."""
    tree = mb_spec.pop("tree", False)
    given = {f"actor.mb_spec.{name}": value for name, value in mb_spec.items()}
    given |= {"actor.enable_tree_training": tree, "total_train_steps": 1, "train_dataset.batch_size": rows}
    root.mkdir(parents=True, exist_ok=True)
    with trainer_of(settings_of_kind("sft", checkpoint, root, given)) as trainer:
        steps = rows_of_steps(trainer)
        tokens = []
        module = trainer.engine.actor.model.module.model
        module.embed_tokens.register_forward_hook(lambda _, given, __: tokens.append(int(given[0].numel())))
        trainer.train()
        lengths = [len(row.tokens) for row in steps[0]]
        bins = micro_batching(trainer.config.actor.mb_spec, tree=tree).bins([row.tokens for row in steps[0]])
        if not tree:
            assert tokens == [sum(lengths[i] for i in found) for found in bins]
        run = Run(trainer)
        assert run.column("sft/num_micro_batches") == [len(tokens)]
        return tokens, run.column("sft/loss")[0]


def test_micro_batches_are_split_as_configured_and_the_loss_is_unchanged(tiny_checkpoint, tmp_path):
    def run(name: str, **mb_spec: Any) -> tuple[list[Any], float]:
        return passes_of(tiny_checkpoint, tmp_path / name, rows=12, **mb_spec)

    free = {"max_tokens_per_mb": None}
    whole, loss = run("one", **free)
    assert len(whole) == 1
    total = whole[0]
    cases = {
        "n_mbs": run("n_mbs", **free, n_mbs=3),
        "most": run("most", max_tokens_per_mb=total // 3),
        "divisor": run("divisor", **free, n_mbs=3, n_mbs_divisor=4),
        "kk": run("kk", **free, n_mbs=5, packing_algorithm="kk"),
        "blocks": run("blocks", max_tokens_per_mb=1, granularity=3),
        "last block": run("last", max_tokens_per_mb=1, granularity=5),
        "tree": run("tree", **free, tree=True),
    }
    assert [len(cases[name][0]) for name in ("n_mbs", "divisor", "kk", "blocks", "last block")] == [3, 4, 5, 4, 3]
    assert max(cases["most"][0]) <= total // 3
    assert cases["tree"][0][0] < total  # common prefixes are computed once
    for name, (_, same) in cases.items():
        assert same == pytest.approx(loss, rel=1e-4), name


def test_packing_algorithms_fill_or_balance_the_micro_batches():
    from areno.config.experiment import MicroBatchSpec

    lengths = [[0] * n for n in (9, 9, 4, 3, 3)]
    bins = {
        name: [sum(len(lengths[i]) for i in found) for found in micro_batching(spec).bins(lengths)]
        for name, spec in {
            "ffd": MicroBatchSpec(max_tokens_per_mb=16),
            "kk": MicroBatchSpec(max_tokens_per_mb=16, packing_algorithm="kk"),
        }.items()
    }
    assert sorted(bins["ffd"]) == [12, 16]  # first fit: 9 + 4 + 3, then 9 + 3
    assert sorted(bins["kk"]) == [13, 15]  # as equal as differencing makes them: 9 + 4, 9 + 3 + 3


# -- preferences -----------------------------------------------------------------------------------------------------


def test_preference_losses_follow_their_formulas(tiny_checkpoint, tmp_path):
    """At the first step policy and reference are the same model, so every log-ratio is 0."""
    for beta in (0.1, 0.7):
        sigmoid = run_kind("dpo", tiny_checkpoint, tmp_path / f"s{beta}", {"actor.beta": beta})
        assert sigmoid.column("dpo/loss")[0] == pytest.approx(math.log(2), rel=1e-5)
        given = {"actor.beta": beta, "actor.loss_type": "ipo"}
        ipo = run_kind("dpo", tiny_checkpoint, tmp_path / f"i{beta}", given)
        assert ipo.column("dpo/loss")[0] == pytest.approx((0 - 1 / (2 * beta)) ** 2, rel=1e-4)


def test_a_preference_loss_gets_the_settings_of_its_section():
    given = {"beta": 0.3, "label_smoothing": 0.2}
    for kind, normalized in {"sigmoid": False, "ipo": True, "hinge": False}.items():
        bound = preference_loss(DPOEngineConfig(path="x", loss_type=kind, **given)).keywords
        assert {name: bound[name] for name in given} == given
        assert (bound["loss_type"], bound["length_normalized"]) == (kind, normalized)
    named = preference_loss(DPOEngineConfig(path="x", algorithm="simpo", algorithm_options={"simpo_beta": 3}))
    assert named.keywords["knobs"].simpo_beta == 3.0


def test_the_reference_scores_once_and_its_logprobs_are_kept_on_disk_for_a_resumed_run(
    tiny_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))
    reference = save_tiny_checkpoint(tmp_path / "reference", seed=7)
    given = {
        "ref.path": str(reference),
        "total_train_steps": 4,
        "total_train_epochs": 2,
        "train_dataset.batch_size": 12,
    }
    given |= {
        "valid_dataset.path": "${train_dataset.path}",
        "valid_dataset.type": "dpo",
        "valid_dataset.split": "train",
    }
    given |= {"evaluator.eval_before_train": True, "actor.mb_spec.max_tokens_per_mb": 200}
    given |= {"recover.mode": "auto", "recover.freq_steps": 1}
    whole = run_kind("dpo", tiny_checkpoint, tmp_path / "whole", given)
    run_kind("dpo", tiny_checkpoint, tmp_path / "parted", {**given, "total_train_steps": 1})
    runs = [whole, run_kind("dpo", tiny_checkpoint, tmp_path / "parted", given)]
    logs = [(run.folder / "main.log").read_text(encoding="utf-8") for run in runs]
    assert [log.count("stage=logprob_score_start rows=24") for log in logs] == [1, 0]
    assert [log.count("are read from") for log in logs] == [1, 4]  # held-out rows are training rows, scored already
    assert "ref" not in runs[0].trainer.engine.roles
    assert not differ(*runs)
    policy, frozen = (answer_logprobs(path, PAIRS) for path in (tiny_checkpoint, reference))
    expected = [0.1 * (p[0] - f[0]) for p, f in zip(policy, frozen, strict=True)]
    assert runs[0].column("dpo/chosen_reward/avg")[0] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert runs[0].column("dpo/eval/chosen_reward/max")[0] == pytest.approx(max(expected), abs=1e-4)
