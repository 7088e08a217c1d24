"""What the documentation names exists (links, commands, options, files of a run), and its programs run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from areno.cli.main import COMMANDS, main
from areno.config import TrainOptions, get_algorithm, list_algorithms, options_of
from areno.config.eval_options import EvalOptions, ExportOptions
from areno.config.serve_options import ChatOptions, ServeOptions
from areno.quickstart.from_scratch import RL_STEPS, SFT_STEPS
from tests.experiments.trainer_stage import run_kind
from tests.support.cli import python, task_arguments, write_task

REPO = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(REPO / "docs").glob("*.md"),
        *(REPO / "examples").rglob("*.md"),
    ]
)
# Flags in the pages that are not among the declared options, with the program that has them.
OTHER_FLAGS = {
    "--help": "every command",
    "--learning-rate": "TRL",
    "--install": "xcode-select",
    "--rate": "benchmarks/serve_load.py",
    **dict.fromkeys(("--only", "--tests-from"), "python -m tests.planted"),
    **dict.fromkeys(("--weight-version", "--enable-lora", "--max-lora-rank"), "SGLang or vLLM"),
    "--version": "areno",
    "--json": "areno env",
    "--real": "areno quickstart",
    "--logdir": "tensorboard",
    "--all": "areno inspect",
    "--run": "areno explain",
    "--sample": "areno inspect",
    "--step": "areno inspect",
    "--limit": "areno inspect",
    **dict.fromkeys(
        ("--metric", "--out", "--x", "--smooth", "--mean-over", "--samples", "--title", "--height"), "areno plot"
    ),
    "--add": "areno scale",
    "--open": "areno view",
    "--engine": "benchmarks/gpu.sh",
    "--kind": "areno convert",
    **dict.fromkeys(("--updates", "--out"), "areno replay"),
    **dict.fromkeys(
        ("--fit", "--try", "--devices", "--device-memory", "--per-node", "--microbatches", "--optimizer"),
        "areno plan --fit",
    ),
    **dict.fromkeys(("--output", "--count", "--held-out", "--whole-games", "--long"), "generators of examples/agentic"),
    "--data": "examples/structured/evaluate.py",
    **dict.fromkeys(
        (
            "--served-model-name",
            "--enable-scale-out",
            "--logprobs-mode",
            "--generation-config",
            "--worker-extension-cls",
        ),
        "vllm serve",
    ),
    **dict.fromkeys(("--expert", "--steps"), "examples/agentic/warm_start.py and areno quickstart"),
    **dict.fromkeys(("--replay", "--debug-llm"), "examples/agentic/duelgrid/web_ui.py"),
    **dict.fromkeys(("--unbuffered", "--mpi", "--chdir"), "srun, a default in docs/configuration.md"),
    "--decode": "benchmarks/ranks.py",
    "--base": "benchmarks/regression.py",
    **dict.fromkeys(("--head", "--address"), "ray start"),
    "--width": "examples/agentic/warm_start.py and areno plot",
    "--outfile": "convert_hf_to_gguf.py of llama.cpp",
    "--depth": "git clone",
    "--no-deps": "pip",
    "--positive-weight": "the algorithm in docs/algorithms.md",
    "--batchsize": "a typing error, in docs/troubleshooting.md",
}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub generates them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_relative_links_lead_to_files_and_headings_that_exist(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_files_and_names_of_the_code_map_exist():
    text = (REPO / "docs/code-map.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?!areno/)[\w/]+(?:\.py|/))`(?: \(((?:`\w+`(?:, )?)+)\))?", text)
    assert len(named) > 80
    for path, names in named:
        file = REPO / "areno" / path
        assert file.exists(), path
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:class|def|async def) {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE), (
                name
            )


@pages
def test_options_that_a_page_names_exist(page):
    commands = (TrainOptions, EvalOptions, ExportOptions, ServeOptions, ChatOptions)
    entries = [entry for declaration in commands for entry in options_of(declaration)]
    entries += [entry for name in list_algorithms() for entry in get_algorithm(name).own_options()]
    known = {entry.flag for entry in entries} | OTHER_FLAGS.keys()
    known |= {"--no-" + entry.flag.removeprefix("--") for entry in entries if entry.kind is bool}
    named = set(re.findall(r"(?<![\w-])--[a-z0-9-]*[a-z0-9](?![\w-])", page.read_text(encoding="utf-8")))
    assert named - known == set()


@pages
def test_commands_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    code = [*code_blocks(page, "bash"), *code_blocks(page, "text"), *inline]
    named = [
        word for part in code for word in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?areno ([a-z]+)", part, re.MULTILINE)
    ]
    assert set(named) - COMMANDS.keys() == set()


@pages
def test_python_code_of_a_page_compiles(page):
    for number, block in enumerate(code_blocks(page, "python")):
        compile(block, f"{page.name} block {number}", "exec")


@pages
def test_checkpoints_that_a_page_names_are_those_of_the_quickstart(page):
    named = re.findall(r"runs/demo/(\w+)/checkpoints/step_(\d+)", page.read_text(encoding="utf-8"))
    assert set(named) <= {("sft", f"{SFT_STEPS:06d}"), ("gspo", f"{RL_STEPS:06d}")}


def test_options_page_is_what_make_options_writes():
    spec = importlib.util.spec_from_file_location("make_options", REPO / "docs" / "make_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.PAGE.read_text(encoding="utf-8")
    assert written == module.render(), "run: python docs/make_options.py"
    assert all(f"`{entry.flag}" in written for entry in options_of(TrainOptions))


def test_the_sdk_program_runs_unchanged(tmp_path, tiny_checkpoint):
    program = tmp_path / "own_loop.py"
    program.write_text(code_blocks(REPO / "docs" / "sdk.md", "python")[0], encoding="utf-8")
    done = python(program, tiny_checkpoint, folder=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step \d: reward \d\.\d+, log-prob gap \d\.\de-\d\d$", done.stdout, re.MULTILINE)) == 10
    assert (tmp_path / "own-checkpoint" / "model.safetensors").is_file()


def test_the_algorithm_of_the_page_trains_with_its_own_option_in_both_front_ends(tmp_path, tiny_checkpoint):
    file = tmp_path / "reinforce.py"
    file.write_text(code_blocks(REPO / "docs" / "algorithms.md", "python")[-1], encoding="utf-8")
    own = {"actor.algorithm": f"{file}:SPEC", "actor.algorithm_options.positive_weight": 2, "total_train_steps": 1}
    experiment = run_kind("rl", tiny_checkpoint, tmp_path / "experiment", own)
    assert experiment.column("ppo_actor/update/policy_loss")
    run = tmp_path / "run"
    arguments = task_arguments(f"{file}:SPEC", tiny_checkpoint, write_task(tmp_path / "task"), run)
    assert main([*map(str, arguments), "--positive-weight", "2", "--max-steps", "2"]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1]
    assert all("train/policy_loss" in record for record in records)
    assert "positive_weight: 2.0" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_every_file_of_a_run_is_documented(algo, tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    arguments = task_arguments(algo, tiny_checkpoint, write_task(tmp_path / "task"), run)
    assert main([*map(str, arguments), "--max-steps", "1"]) == 0
    text = (REPO / "docs" / "run-directory.md").read_text(encoding="utf-8")
    written = {entry.name + ("/" if entry.is_dir() else "") for entry in run.iterdir()} - {"checkpoints/"}
    assert {name for name in written if f"`{name}`" not in text} == set()
    assert "`checkpoints/step_000100/`" in text
