import os
import subprocess
import sys
import time
from pathlib import Path

from areno import __version__
from areno.cli.main import main

REPO = Path(__file__).parents[2]

GROUPS = {
    "Basic": (
        "ckpt dataset-path dataset-loader-fn algo epochs max-steps max-sequences world-size tp-size fsdp stall-timeout seed "
        "shuffle no-shuffle config dry-run device dtype trust-remote-code"
    ),
    "Rollout": (
        "batch-size n-samples max-running-prompts max-prompt-tokens max-new-tokens max-context-len temperature "
        "top-k top-p greedy eager-decode speculate drop-rollout-state attn-backend disable-thinking agent-fn "
        "return-routed-experts agent-timeout-s agent-retries agent-max-failures train-tool-results turn-discount "
        "reward-fn-path reward-weights reward-normalize-parts reward-ckpt reward-timeout-s reward-memory-gb reward-workers "
        "on-reward-error rollout rollout-replicas rollout-backend rollout-url rollout-server-command rollout-server-args "
        "max-staleness workflow kv-cache-tokens stop stop-token-ids ignore-eos"
    ),
    "Parameter tuning": "tune-params mem-frac tune-max-samples",
    "Train": (
        "mini-bs gradient-accumulation-steps activation-checkpointing no-activation-checkpointing "
        "tree-training no-tree-training offload-activations lr min-lr "
        "lr-warmup-steps lr-decay-steps lr-decay-style adam-beta1 adam-beta2 adam-eps adam-8bit offload-optimizer weight-decay "
        "grad-clip-norm score-micro-bs update-epochs update-minibatches ref-ckpt critic-ckpt critic-lr critic-min-lr "
        "critic-lr-warmup-steps critic-lr-decay-steps critic-lr-decay-style critic-grad-clip-norm critic-warmup-steps "
        "gspo-clip-eps grpo-clip-eps clip-eps-high grpo-dual-clip grpo-loss-mean advantage kl-coef kl-reward-coef "
        "kl-reward-type dpo-beta dpo-loss-type dpo-label-smoothing dpo-length-normalized bootstrap-truncated "
        "no-bootstrap-truncated whiten-advantages no-whiten-advantages "
        "use-kl-loss no-use-kl-loss kl-loss-coef kl-loss-type clip-eps clip-ratio-c value-clip-eps "
        "value-loss-coef gamma lam"
    ),
    "LoRA": "lora-rank lora-alpha lora-dropout lora-target-modules lora-adapter-path load-in-4bit",
    "Checkpoint": (
        "save-path save-interval save-interval-minutes keep-checkpoints keep-best model-save-interval save-async "
        "no-save-async run-dir resume resume-step"
    ),
    "Evaluation": (
        "eval-dataset-path eval-dataset-loader-fn eval-interval early-stop-patience eval-before-train "
        "no-eval-before-train eval-max-rows eval-n-samples eval-temperature"
    ),
    "Observability": "metrics-log-dir track track-project save-rollouts trace log-level",
}


def train_help(capsys):
    assert main(["train", "--help"]) == 0
    return capsys.readouterr().out


def sections(text):
    """Flags by section title of a help text."""
    by_title, title = {}, ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
        elif line.startswith("  --"):
            flags = line.strip().split("  ")[0].replace(",", " ").split()
            by_title.setdefault(title, []).extend(flag for flag in flags if flag.startswith("--"))
    return by_title


def test_every_option_is_listed_once_in_its_group(capsys):
    expected = {title: sorted("--" + name for name in names.split()) for title, names in GROUPS.items()}
    assert {title: sorted(flags) for title, flags in sections(train_help(capsys)).items()} == expected


def test_groups_follow_the_training_loop(capsys):
    assert list(sections(train_help(capsys))) == list(GROUPS)


def test_defaults_are_shown(capsys):
    text = " ".join(train_help(capsys).split())
    for part in (
        "Default: gspo.",
        "Default: all visible GPUs that rollout does not use; 1 on a CPU.",
        "Default: 3071.",
        "Default: 1e-06.",
    ):
        assert part in text
    assert "lowers the bias of the advantages, but raises their variance. Default: 0.95. (ppo)" in text


def test_commands_are_listed_sorted_with_their_descriptions(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    texts = [
        "check       Check whether this machine is ready to run AReno.",
        "env         Print a report about this machine, for bug reports.",
        "export      Merge an adapter into its base model and write a full checkpoint.",
        "plan        Estimate the memory of a training run, and report whether the run fits.",
        "quickstart  ",
        "train       Run SFT, DPO, GSPO, GRPO, or PPO training.",
    ]
    places = [out.index(text) for text in texts]
    assert places == sorted(places)


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: areno COMMAND")


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"areno {__version__}\n"


def test_help_of_check_and_env_exits_with_0(capsys):
    assert [main(["check", "-h"]), main(["env", "--help"])] == [0, 0]


def run(*argv, cwd, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, **kwargs
    )


def test_help_loads_no_torch_and_is_quick(tmp_path):
    code = (
        "import sys; from areno.cli.main import main; assert main(sys.argv[1:]) == 0\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    for argv in (["--help"], ["train", "--help"]):
        assert run("-c", code, *argv, cwd=tmp_path).stdout.splitlines()[-1] == "[]"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run("-m", "areno", "--help", cwd=tmp_path)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5


def test_a_closed_pipe_causes_no_error_message(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m areno train --help | head -1",
        shell=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("usage: areno train")
    assert done.stderr == ""


def test_wrong_usage_gives_one_message_within_two_seconds(tmp_path):
    for argv in (["train"], ["train", "--epochs", "0"], ["trian"], ["train", "--config", "gone.yaml"]):
        began = time.perf_counter()
        done = run("-m", "areno", *argv, cwd=tmp_path)
        assert time.perf_counter() - began < 2
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
