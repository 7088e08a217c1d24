"""Documented runs: the quickstart's command, agents over a fleet, tracking services and traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areno.observability.experiment_metrics import SHORT_NAMES
from examples.experiments import toy
from tests.experiments.runs import ROOT, TOY, Run, Task, make_task, settings

AGENT = f"{ROOT}/tests/experiments/agent_of_runs.py:Echo"

QUICKSTART = """
    n_nodes=1 n_gpus_per_node=8
    allocation_mode=areno.d1p1m1+d1p1m1
    cluster.fileroot={root}
    actor.type._class=llama
    actor.path={model}
    ref.type._class=llama
    ref.path={model}
    dataset.path={data}
    dataset.train_bs_n_seqs=8
    group_size=4
    ppo.gen.max_new_tokens=8
    ppo.ppo_n_minibatches=4
    actor_train.mb_spec.max_tokens_per_mb=32768
    actor_inf.mb_spec.max_tokens_per_mb=32768
    max_concurrent_rollouts=16
    max_head_offpolicyness=4
"""

TENSORS = {
    "ppo_actor": "task_reward advantages kl_rewards final_reward no_eos_ratios prompt_len seq_len incorrect_seq_len",
    "ppo_actor/update": "importance_weight approx_kl new_logp old_logp entropy actor_loss clip_ratio dual_clip_ratio "
    "behave_imp_weight behave_approx_kl",
}
NUMBERS = {
    "ppo_actor": "n_seqs n_tokens n_valid_tokens correct_n_seqs incorrect_n_seqs eps_clip use_dual_clip "
    "mask_no_eos_with_zero rs_upper",
    "ppo_actor/update": "clipped_tokens unclipped_behave_tokens rs_filtered_fraction grad_norm lr update_successful",
    "ppo_actor/update/version_stats": "sample_staleness_proximal_avg sample_staleness_proximal_max "
    "sample_staleness_proximal_min sample_staleness_theta_avg sample_staleness_theta_max sample_staleness_theta_min "
    "v_theta v_proximal n_valid_generated_tokens",
    "rollout": "accepted rejected",
    "memory": "peak_resident_gib available_gib",
    "timeperf": "rollout ref_logp recompute_logp compute_advantage train_step update_weights save rollout_pause",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.end()


def quickstart(task: Task, folder: Path, rows: list[dict[str, Any]], *more: str) -> Run:
    toy.write(folder / "boba.jsonl", rows)
    text = QUICKSTART.format(root=folder / "files", model=task.model, data=folder / "boba.jsonl")
    return Run(folder, [*text.split(), *more], program=(str(ROOT / "training/main_async_ppo.py"),), forked=True)


def boba(prompt: str, number: int) -> dict[str, Any]:
    return {"prompt": prompt, "query_id": f"q{number}", "solutions": [f"\\boxed{{{number}}}"], "task": "math"}


def test_the_quickstart_command_runs_and_reports_its_statistics(task, tmp_path, runs):
    rows = [boba(prompt, number) for number, prompt in enumerate(task.prompts[:24])]
    run = quickstart(task, tmp_path, rows)
    runs.append(run.finish())
    (log,) = (tmp_path / "files/logs").glob("*/*/*/main.log")
    assert log.parent == run.logs
    assert re.search(r"Epoch 1/1 step 3/3 global step 3 ", run.log)
    assert run.steps() == [0, 1, 2]
    metrics = run.lines("metrics.jsonl")
    wanted = [
        f"{scope}/{name}/{part}"
        for scope, names in TENSORS.items()
        for name in names.split()
        for part in ("avg", "min", "max")
    ]
    wanted += [f"{scope}/{name}" for scope, names in NUMBERS.items() for name in names.split()]
    wanted += [
        f"{name}/avg"
        for name in (
            *SHORT_NAMES,
            "rollout/reward",
            *(f"ppo_actor/update/compute_logp/kl_div_{k}" for k in ("direct", "taylor", "dual")),
        )
    ]
    for line in metrics:
        assert [name for name in wanted if name not in line] == []
        assert "timeperf/checkpoint_for_recover" in line or line["step"] == 0  # reported with the next step
        assert line["ppo_actor/n_seqs"] == 32
        assert line["ppo_actor/task_reward/avg"] == 0.0  # letters are not right answers
        assert line["ppo_actor/update/version_stats/v_theta"] == line["step"] + 1
    for sample in run.lines("samples.jsonl"):
        number = next(row["query_id"][1:] for row in rows if row["prompt"] in sample["prompt"])
        assert sample["data"] == {"query_id": f"q{number}", "solutions": f"['\\\\boxed{{{number}}}']", "task": "math"}
    size = json.loads((run.logs / "environment.json").read_text())["data"]
    assert size == {"examples": 24, "prompts": 24, "steps_per_epoch": 3}
    shown = set(re.findall(r"^  (\S+) \.\.", run.log, re.MULTILINE))
    assert [name for name in wanted if name not in shown] == []


@pytest.mark.long
def test_the_success_band_of_the_quickstart_filters_prompts(task, tmp_path, runs):
    rows = [{**boba(prompt, 0), "letter": prompt[4]} for prompt in task.prompts]
    band = (
        "success_rate_lb=0.05",
        "success_rate_ub=0.3",
        f"reward.fn={TOY}:letter_reward",
        "rollout.dump_to_file=true",
    )
    run = quickstart(task, tmp_path, rows, *band, "total_train_steps=2", "exp_ctrl.ckpt_freq_steps=1")
    runs.append(run.finish())
    rates = {}
    for path in (run.logs / "rollout").glob("*/*.jsonl"):
        rewards = [json.loads(line)["reward"] for line in path.read_text().splitlines()]
        rates[int(path.stem)] = sum(rewards) / len(rewards)
    used = {line["prompt_index"] for line in run.lines("samples.jsonl")}
    assert len(used) == 16
    assert all(0.05 <= rates[episode] <= 0.3 for episode in used)
    outside = [episode for episode, rate in rates.items() if not 0.05 <= rate <= 0.3]
    assert outside
    assert run.lines("metrics.jsonl")[-1]["rollout/filtered"] > 0
    assert run.recovery_checkpoints()


def test_the_synchronous_program_lists_its_keys():
    found = subprocess.run(
        [sys.executable, "training/main_sync_ppo.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    keys = [word.partition("=")[0] for word in QUICKSTART.split()]
    keys += [f"exp_ctrl.{kind}_freq_{unit}" for kind in ("save", "ckpt") for unit in ("epochs", "steps", "secs")]
    keys += ["experiment_name", "trial_name", "exp_ctrl.total_train_epochs", "ref_inf.mb_spec.max_tokens_per_mb"]
    keys += ["ppo.recompute_logprob", "ppo.use_decoupled_loss", "success_rate_ub", "success_rate_lb"]
    keys += ["wandb.mode", "tensorboard.path"]
    assert [key for key in keys if not re.search(rf"^  {re.escape(key)}( |$)", found, re.MULTILINE)] == []


def test_configuration_errors_are_reported_before_torch_is_imported(task, tmp_path):
    """Each entry point reports wrong settings before it imports torch."""
    wrong = settings(task, tmp_path, actor__optimizer__lr="fast", gconfig__n_sample=3)
    (tmp_path / "file.yaml").write_text("{}\n")
    spy = (
        "import sys, atexit, runpy\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "name, sys.argv = sys.argv[1], sys.argv[1:]\n"
        "sys.path.insert(0, name.rpartition('/')[0])\n"
        "run = runpy.run_path if name.endswith('.py') else runpy.run_module\n"
        "run(name, run_name='__main__')\n"
    )
    entries = {
        "train.py": ["examples/experiments/train.py", "--config", str(tmp_path / "file.yaml"), *wrong],
        "areno run": ["areno", "run", "--config", str(tmp_path / "file.yaml"), *wrong],
        "main_async_ppo.py": ["training/main_async_ppo.py", "actor.path=/nowhere", "group_size=many", "group_sise=3"],
    }
    for name, argv in entries.items():
        done = subprocess.run(
            [sys.executable, "-c", spy, *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode != 0, name
        assert done.stderr.startswith("error: "), (name, done.stderr)
        assert re.search("n_sample|group_sise", done.stderr), (name, done.stderr)
        assert done.stderr.rstrip().endswith("False"), (name, done.stderr)


LONG = {
    "rollout__backend": "areno:d2",
    "gconfig__max_new_tokens": 24,
    "gconfig__max_tokens": 256,
    "gconfig__ignore_eos": True,
    "gconfig__n_samples": 4,
}


@pytest.mark.long
def test_services_and_traces_record_the_metrics_and_nothing_blocks_generation(task, tmp_path, runs):
    """Evaluation and saving happen during answers: spans of generation continue through them."""
    lines = task.rows.read_text().splitlines(keepends=True)
    (tmp_path / "valid.jsonl").write_text("".join(lines[:8]))
    more = {
        "total_train_steps": 6,
        "gconfig__max_new_tokens": 120,
        "rollout__max_head_offpolicyness": 8,
        "saver__freq_steps": 1,
        "saver__mode": "sync",
        "evaluator__freq_steps": 2,
        "valid_dataset__path": tmp_path / "valid.jsonl",
        "valid_dataset__type": "rl",
        "valid_dataset__batch_size": 4,
        "stats_logger__wandb__mode": "offline",
        "stats_logger__tensorboard__path": tmp_path / "tensorboard",
        "perf_tracer__enabled": True,
        "perf_tracer__session_tracer__enabled": True,
    }
    run = Run(tmp_path, settings(task, tmp_path / "files", **{**LONG, **more})).finish()
    runs.append(run)
    metrics = run.lines("metrics.jsonl")
    assert run.steps() == list(range(6))
    assert sum("eval-rollout/reward/avg" in line for line in metrics) == 3
    check_services(run, metrics, tmp_path)

    trace = tool("perf_trace_converter", run.logs, tmp_path / "trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"step", "rollout", "train_step", "update_weights", "save", "eval"} <= {event["name"] for event in events}
    assert "accepted" in tool("plot_session_trace", run.logs, tmp_path / "sessions.html").read_text()
    found = [json.loads(line) for path in run.logs.rglob("sessions-r*.jsonl") for line in path.read_text().splitlines()]
    assert sum(session["status"] == "accepted" for session in found) >= 24
    spans = [(span["start_ts"], span["end_ts"]) for session in found for span in session["phases"].get("generate", [])]
    for name in ("eval", "save"):
        held = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["name"] == name and e["ph"] == "X"]
        through = [one for one in held if any(begin < one[0] and one[1] < end for begin, end in spans)]
        begun = [one for one in held if any(one[0] < begin < one[1] for begin, _ in spans)]
        assert through or begun, f"no generation ran during {name}"


def check_services(run: Run, metrics: list[dict[str, Any]], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (folder / "tensorboard").rglob("events.out.*")
    found = EventAccumulator(str(events), {"scalars": 0}).Reload()
    logged = [(event.step, event.value) for event in found.Scalars("ppo_actor/task_reward/avg")]
    assert logged == [(line["step"], pytest.approx(line["ppo_actor/task_reward/avg"], rel=1e-6)) for line in metrics]
    (offline,) = run.logs.rglob("run-*.wandb")
    assert b"ppo_actor/task_reward/avg" in offline.read_bytes()


@pytest.mark.parametrize("mode", ["inline", pytest.param("subproc", marks=pytest.mark.long)])
def test_an_agent_runs_over_several_replicas(task, tmp_path, runs, mode):
    pids = tmp_path / "pids"
    changes = {
        **LONG,
        "rollout__agent__agent_cls_path": AGENT,
        "rollout__agent__mode": mode,
        "total_train_steps": 2,
    }
    if mode == "subproc":
        changes["rollout__agent__subproc_max_workers"] = 2
    environment = {"ARENO_TEST_PIDS": str(pids)}
    run = Run(tmp_path, settings(task, tmp_path / "files", **changes), environment=environment, forked=True)
    runs.append(run.start())
    assert run.until(lambda: len(run.pids()) >= 3)  # the trainer and two replicas
    assert run.wait() == 0, run.output[-6000:]
    assert run.steps() == [0, 1]
    for line in run.lines("metrics.jsonl"):
        assert line["ppo_actor/n_seqs"] == 4 * 4 * 2  # two turns are two rows
        assert line["rollout/failed"] == 0
    assert run.process is not None
    others = set(pids.read_text().split()) - {str(run.process.pid)}
    assert len(others) == (0 if mode == "inline" else 2)
    assert run.none_left()


def tool(name: str, logs: Path, output: Path) -> Path:
    subprocess.run([sys.executable, "-m", f"areno.tools.{name}", str(logs), str(output)], cwd=ROOT, check=True)
    return output
