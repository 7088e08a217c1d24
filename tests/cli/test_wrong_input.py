"""Wrong input through the real command line: exit code 2, one message on stderr, no traceback, nothing left behind."""

import pytest
import torch

from areno.cli.main import main
from areno.errors import EngineError
from tests.config.workspace import BASE, GSPO, SFT, stored_run

TRAIN = [
    ([], "--ckpt is required"),
    (["--ckpt", "model"], "--dataset-path is required"),
    ([*BASE, "--algo", "sft"], "--dataset-loader-fn is required for --algo sft"),
    (BASE, "--reward-fn-path or --reward-ckpt is required"),
    ([*GSPO, "--epoch", "3"], "--epoch is not an option (did you mean --epochs?)"),
    ([*GSPO, "stray"], "unexpected argument 'stray'"),
    ([*GSPO, "--epochs"], "--epochs needs a value"),
    ([*GSPO, "--greedy=yes and no"], "--greedy takes no value, but got 'yes and no'; write"),
    (
        [*GSPO, "--shuffle=no"],
        "--shuffle takes no value, but got 'no'; write --shuffle without a value (to turn off an on/off option --NAME, write "
        "--no-NAME)",
    ),
    ([*GSPO, "--epochs", "ten"], "--epochs 'ten': expected an integer"),
    ([*GSPO, "--epochs", "2.5"], "--epochs '2.5': expected an integer"),
    ([*GSPO, "--lr", "fast"], "--lr 'fast': expected a number"),
    ([*GSPO, "--stop-token-ids", "1,x"], "--stop-token-ids 'x': expected an integer"),
    ([*GSPO, "--epochs", "0"], "--epochs must be positive, got 0"),
    ([*GSPO, "--max-steps", "-1"], "--max-steps must be positive, got -1"),
    ([*GSPO, "--batch-size", "0"], "--batch-size must be positive"),
    ([*GSPO, "--mini-bs", "0"], "--mini-bs must be positive"),
    ([*GSPO, "--n-samples", "1"], "--n-samples 1: gspo compares the samples of a prompt"),
    ([*GSPO, "--temperature", "0"], "--temperature must be positive, got 0.0; for greedy decoding use --greedy"),
    ([*GSPO, "--top-p", "1.5"], "--top-p must be at most 1, got 1.5"),
    ([*GSPO, "--top-p", "0"], "--top-p must be positive"),
    ([*GSPO, "--top-k", "0"], "--top-k must be -1 (no limit) or at least 1, got 0"),
    ([*GSPO, "--top-k", "-5"], "--top-k must be at least -1, got -5"),
    ([*GSPO, "--lr", "nan"], "--lr nan is not a finite number"),
    ([*GSPO, "--lr", "-1e-6"], "--lr must be positive, got -1e-06"),
    ([*GSPO, "--weight-decay", "-inf"], "--weight-decay -inf is not a finite number"),
    ([*GSPO, "--adam-beta1", "1"], "--adam-beta1 must be below 1, got 1.0"),
    ([*GSPO, "--adam-beta2", "-0.1"], "--adam-beta2 must be non-negative"),
    ([*GSPO, "--min-lr", "1"], "--min-lr 1.0 is above --lr 1e-06"),
    ([*GSPO, "--lr-decay-style", "cosin"], "--lr-decay-style 'cosin' is unknown; choose constant, linear, cosine"),
    ([*GSPO, "--kl-loss-type", "k9"], "--kl-loss-type 'k9' is unknown"),
    ([*GSPO, "--attn-backend", "fast"], "--attn-backend 'fast' is unknown; choose flash, native"),
    ([*GSPO, "--device", "tpu"], "--device 'tpu' is unknown"),
    ([*GSPO, "--dtype", "fp16"], "--dtype 'fp16' is unknown"),
    ([*GSPO, "--seed", "-1"], "--seed must be non-negative, got -1"),
    ([*GSPO, "--save-interval", "0"], "--save-interval must be positive"),
    ([*GSPO, "--keep-checkpoints", "0"], "--keep-checkpoints must be positive"),
    ([*GSPO, "--reward-timeout-s", "0"], "--reward-timeout-s must be positive"),
    ([*GSPO, "--on-reward-error", "skip"], "--on-reward-error 'skip' is unknown; choose stop, drop"),
    ([*GSPO, "--kv-cache-tokens", "100"], "--kv-cache-tokens 100 is too small for one sequence"),
    ([*GSPO, "--stop", ""], "--stop must not be empty"),
    ([*GSPO, "--greedy"], "--greedy with --n-samples 8: all samples of a prompt would be identical"),
    ([*GSPO, "--greedy", "--temperature", "0.7"], "--temperature 0.7 has no effect with --greedy"),
    ([*GSPO, "--greedy", "--top-k", "4"], "--top-k 4 has no effect with --greedy"),
    (
        [*GSPO, "--lr-decay-style", "constant", "--min-lr", "0"],
        "--min-lr 0.0 has no effect with --lr-decay-style constant",
    ),
    ([*GSPO, "--world-size", "3", "--tp-size", "2"], "--world-size must be divisible by --tp-size, got 3 and 2"),
    (
        [*GSPO, "--world-size", "2", "--tp-size", "2", "--speculate", "4"],
        "--speculate 4 with --tp-size 2: speculative decoding does not support tensor parallelism; use only one of them",
    ),
    (
        [*GSPO, "--rollout-backend", "vllm", "--return-routed-experts"],
        "--return-routed-experts has no effect with inference servers, because areno does not read their expert routing; "
        "remove the option",
    ),
    (
        [*SFT, "--return-routed-experts"],
        "--return-routed-experts has no effect with --algo sft, which has no rollouts",
    ),
    (
        [*GSPO, "--fsdp"],
        "--fsdp with --world-size 1: FSDP shards weights across data-parallel ranks and needs at least two",
    ),
    (
        [*GSPO, "--fsdp", "--world-size", "2", "--tp-size", "2"],
        "--fsdp with --world-size 2, --tp-size 2: FSDP shards weights across data-parallel ranks and needs at least two; use "
        "--world-size 4",
    ),
    (
        [*GSPO, "--fsdp", "--world-size", "4", "--tp-size", "2", "--lora-rank", "4"],
        "--fsdp with --lora-rank and --tp-size: areno cannot shard adapters of tensor-parallel layers; use --tp-size 1",
    ),
    ([*GSPO, "--world-size", "2", "--stall-timeout", "0"], "--stall-timeout must be positive, got 0.0"),
    ([*GSPO, "--algo", "gsop"], "--algo 'gsop' is unknown (did you mean gspo?)"),
    ([*GSPO, "--algo", "dpo"], "--reward-fn-path reward.py has no effect with --algo dpo, which has no rollouts"),
    ([*GSPO, "--algo", "ppo", "--dpo-beta", "1"], "--dpo-beta 1.0 applies to --algo dpo, not to ppo"),
    ([*GSPO, "--algo", "gone.py:spec"], "--algo file does not exist: gone.py"),
    ([*GSPO, "--grpo-clip-eps", "0.1"], "--grpo-clip-eps 0.1 applies to --algo grpo, not to gspo"),
    ([*GSPO, "--no-use-kl-loss"], "--no-use-kl-loss applies to --algo ppo, not to gspo"),
    ([*SFT, "--n-samples", "4"], "--n-samples 4 has no effect with --algo sft"),
    ([*SFT, "--reward-fn-path", "reward.py"], "--reward-fn-path reward.py has no effect with --algo sft"),
    ([*SFT, "--greedy"], "--greedy has no effect with --algo sft"),
    (
        [*GSPO, "--agent-fn", "agent.py"],
        "--agent-fn file does not exist: agent.py; pass a Python file that defines run_agent(ctx, batch)",
    ),
    ([*GSPO, "--train-tool-results"], "--train-tool-results has no effect without --agent-fn; set --agent-fn too"),
    (
        [*GSPO, "--max-staleness", "2"],
        "--max-staleness 2 has no effect without --rollout async; set --rollout async",
    ),
    (
        [*GSPO, "--rollout", "async", "--agent-fn", "reward.py"],
        "--rollout async with --agent-fn reward.py: this agent can only use",
    ),
    (
        [*GSPO, "--rollout", "async", "--tune-params"],
        "--rollout async with --tune-params: tuning ignores the memory of rollout processes",
    ),
    (
        [*GSPO, "--rollout", "async", "--lora-rank", "4", "--load-in-4bit"],
        "--rollout async with --load-in-4bit: rollout processes cannot use 4-bit weights",
    ),
    (
        [*GSPO, "--reward-weights", "format"],
        "--reward-weights 'format': 'format' is not a valid weight; write each reward part's name",
    ),
    (
        [*BASE, "--reward-ckpt", "model", "--reward-weights", "a=1"],
        "--reward-weights a=1 has no effect with --reward-ckpt",
    ),
    (
        [*GSPO, "--reward-normalize-parts", "--turn-discount", "0.9"],
        "--reward-normalize-parts has no effect with --turn",
    ),
    (
        [*GSPO, "--workflow", "reward.py:Even", "--reward-weights", "a=1"],
        "--reward-weights a=1 has no effect with --workf",
    ),
    ([*GSPO, "--workflow", "reward.py:reward_fn"], "--reward-fn-path reward.py has no effect with --workflow"),
    (
        [*BASE, "--workflow", "reward.py"],
        "--workflow reward.py names no class or object; add the name, as in file.py:NAME",
    ),
    ([*BASE, "--workflow", "gone.py:Even"], "--workflow file does not exist: gone.py"),
    ([*BASE, "--workflow", "reward.py:Even"], "reward.py defines no Even"),
    ([*BASE, "--workflow", "gone.pytools:Even"], "importing gone.pytools raised ModuleNotFoundError"),
    (
        [*BASE, "--workflow", "greedy.py:Greedy"],
        "areno constructs the class with only gconfig and tokenizer, which fails: missing a required argument",
    ),
    (
        [*BASE, "--workflow", "reward.py:reward_fn"],
        "the workflow has neither `async def arun_episode(self, engine, data)`",
    ),
    ([*GSPO, "--mem-frac", "0.5"], "--mem-frac 0.5 has no effect without tuning; set --tune-params too"),
    (
        [*GSPO, "--tune-params", "--batch-size", "2", "--mini-bs", "2", "--max-running-prompts", "4"],
        "--tune-params has nothing to choose, because --max-running-prompts, --batch-size and --mini-bs are all set",
    ),
    ([*SFT, "--tune-params"], "--tune-params has no effect with --algo sft"),
    ([*GSPO, "--device", "cpu", "--offload-optimizer"], "--offload-optimizer has no effect on a CPU"),
    ([*GSPO, "--device", "cpu", "--offload-activations"], "--offload-activations has no effect on a CPU"),
    (
        [*GSPO, "--offload-activations", "--no-activation-checkpointing"],
        "--offload-activations has no effect with --no-activation-checkpointing",
    ),
    (["--ckpt", "./gone", *GSPO[2:]], "--ckpt folder does not exist: ./gone"),
    (["--ckpt", "empty", *GSPO[2:]], "has no config.json"),
    (["--ckpt", "data.jsonl", *GSPO[2:]], "is a file; pass the folder"),
    ([*GSPO, "--dataset-path", "dta.jsonl"], "--dataset-path does not exist: dta.jsonl"),
    ([*GSPO, "--dataset-path", "a:b:c:d"], "has 4 parts"),
    ([*GSPO, "--dataset-path", "empty"], "is an empty folder"),
    (
        [*BASE, "--reward-fn-path", "gone.py"],
        "file does not exist: gone.py; pass a Python file that defines reward_fn(record)",
    ),
    ([*BASE, "--reward-fn-path", "empty"], "--reward-fn-path is not a file: empty"),
    ([*BASE, "--reward-fn-path", "reward.py:score"], "reward.py defines no score"),
    ([*BASE, "--reward-fn-path", "reward.py:"], "write file.py or file.py:reward_fn"),
    ([*BASE, "--reward-fn-path", "two.py"], "missing a required argument: 'completions'"),
    ([*BASE, "--reward-fn-path", "syntax.py"], "line 2 is not valid Python"),
    ([*BASE, "--reward-fn-path", "raises.py"], "raised KeyError: 'rate' (at raises.py line 1: {}['rate'])"),
    ([*GSPO, "--dataset-loader-fn", "narrow.py"], "unexpected keyword argument 'default_loader'"),
    ([*GSPO, "--dataset-loader-fn", "reward.py"], "reward.py defines no load_training_dataset"),
    ([*GSPO, "--run-dir", "runs/old"], "--run-dir runs/old already contains a run"),
    ([*GSPO, "--run-dir", "data.jsonl/run"], "is a file; choose a directory"),
    ([*GSPO, "--save-path", ""], "--save-path must not be empty"),
    ([*GSPO, "--metrics-log-dir", "data.jsonl"], "--metrics-log-dir data.jsonl"),
    (["--resume", "runs/none"], "--resume directory does not exist: runs/none"),
    (["--resume", "runs/old", "--lr", "1"], "--lr 1.0 differs from 1e-06 in runs/old"),
    ([*GSPO, "--resume", "--seed", "9"], "found no run with the same configuration in runs/"),
    (["--config", "gone.yaml"], "--config file does not exist: gone.yaml"),
    (["--config", "typo.yaml"], "typo.yaml: learnrate is not an option"),
    (["--config", "list.yaml"], "list.yaml must contain a mapping"),
]

OTHER = [
    (["trian"], "'trian' is not a command (did you mean train?)"),
    (["server"], "'server' is not a command"),
    (["--verbose"], "'--verbose' is not a command"),
    (["check", "--gpu"], "unrecognized arguments: --gpu; see areno check --help"),
    (["env", "--jsn"], "unrecognized arguments: --jsn; see areno env --help"),
]


@pytest.fixture
def crowded(workspace):
    """The workspace with further files, each wrong in one way."""
    (workspace / "empty").mkdir()
    (workspace / "two.py").write_text("def reward_fn(row, completions):\n    return [0.0]\n")
    (workspace / "narrow.py").write_text("def load_training_dataset(dataset_path):\n    return []\n")
    (workspace / "greedy.py").write_text("class Greedy:\n    def __init__(self, gconfig, judge):\n        pass\n")
    (workspace / "syntax.py").write_text("x = 1\ndef reward_fn(record:\n")
    (workspace / "raises.py").write_text("{}['rate']\n")
    (workspace / "typo.yaml").write_text("learnrate: 1.0e-5\n")
    (workspace / "list.yaml").write_text("- lr\n")
    stored_run(workspace / "runs" / "old", "algo: gspo\nckpt: model\nlr: 1.0e-06\n", step=1)
    return workspace


@pytest.mark.parametrize(("argv", "message"), TRAIN, ids=[message[:50] for _, message in TRAIN])
def test_wrong_training_input_is_refused(crowded, capsys, argv, message):
    before = sorted(crowded.rglob("*"))
    refused(["train", *argv], message, capsys)
    assert sorted(path for path in crowded.rglob("*") if "__pycache__" not in path.parts) == before


def test_rows_in_an_array_are_checked_before_a_model_is_loaded(workspace, capsys):
    rows = "np.array([{'question': '1+1?'}, {'question': '1+2?'}])"
    (workspace / "numpy_rows.py").write_text(
        f"import numpy as np\ndef load_training_dataset(dataset_path, **_):\n    return {rows}\n"
    )
    assert main(["train", *GSPO, "--dataset-loader-fn", "numpy_rows.py"]) == 2
    assert "data.jsonl, row 1: dataset row must contain `prompt`" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), OTHER, ids=[message[:50] for _, message in OTHER])
def test_wrong_commands_are_refused(workspace, capsys, argv, message):
    refused(argv, message, capsys)


def refused(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_at_least_thirty_kinds_of_mistakes_are_covered():
    assert len({message for _, message in TRAIN + OTHER}) >= 30


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_a_failed_allocation_names_the_options_that_reduce_memory(error, monkeypatch, capsys):
    from areno.cli import check

    def fail(_):
        raise error

    def wrapped(_):
        raise EngineError("the rollout loop has died") from error

    for command in (fail, wrapped):
        monkeypatch.setattr(check, "run", command)
        assert main(["check"]) == 1
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        for option in ("--mini-bs", "--kv-cache-tokens", "actor.mb_spec.max_tokens_per_mb"):
            assert option in message


def test_other_errors_keep_their_traceback(monkeypatch):
    from areno.cli import check

    monkeypatch.setattr(check, "run", lambda _: [][0])
    with pytest.raises(IndexError):
        main(["check"])
