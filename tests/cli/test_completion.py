"""The scripts of ``areno completion``, run by the shells themselves, complete what the commands' help lists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from areno.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Folder with the script of each shell; making one loads neither torch nor a model."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        code = (
            "import sys; from areno.cli.main import main; code = main(['completion', sys.argv[1]])\n"
            "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(code)"
        )
        done = subprocess.run([sys.executable, "-c", code, shell], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        (folder / shell).write_text(done.stdout)
    return folder


def completed(scripts, folder, *lines):
    """What bash would insert for each line, whose last word is incomplete; bash also splits words at ``=``."""
    program = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _areno; printf "%s\\n" "${COMPREPLY[@]}"'
    for line in lines:
        words = [word for part in line.split(" ") for word in re.split("(=)", part) if word or "=" not in part]
        done = subprocess.run(
            ["bash", "--norc", "-c", program, "bash", str(scripts / "bash"), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        yield sorted(filter(None, done.stdout.split("\n")))


def test_bash_completes_commands_options_choices_and_files(scripts, tmp_path):
    (tmp_path / "run with spaces").mkdir()
    (tmp_path / "runs.yaml").touch()
    files = ["run with spaces", "runs.yaml"]
    cases = {
        "areno pl": ["plan", "plot"],
        "areno --v": ["--version"],
        "areno train --no-shu": ["--no-shuffle"],
        "areno train --whiten": ["--whiten-advantages"],  # PPO only
        "areno train --algo gr": ["grpo"],
        "areno train --algo=gs": ["gspo"],
        "areno train --dtype ": ["auto", "bfloat16", "float32"],
        "areno train --track ml": ["mlflow"],
        "areno train --lr ": [],
        "areno train --ckpt ru": files,
        "areno train --algo grpo --reward-fn-path ru": files,
        "areno plot --x t": ["time", "tokens"],
        "areno plot run": files,
        "areno inspect runs": ["runs.yaml"],
        "areno diff runs.yaml run": files,
        "areno run runs": ["runs.yaml"],
        "areno run --res": ["--resume"],
        "areno plan --js": ["--json"],
        "areno convert v": ["verl"],
        "areno completion ": ["bash", "fish", "zsh"],
        "areno nothing --": [],
    }
    assert dict(zip(cases, completed(scripts, tmp_path, *cases), strict=True)) == cases


def test_every_option_in_the_help_of_every_command_is_completed(scripts, tmp_path, capsys):
    lines = [f"areno {name} -" for name in COMMANDS]
    for name, words in zip(COMMANDS, completed(scripts, tmp_path, *lines), strict=True):
        assert main([name, "--help"]) == 0
        flags = set(re.findall(r"^  (?:-h, )?(--[a-z][a-z0-9-]*)", capsys.readouterr().out, re.MULTILINE))
        assert flags <= set(words), name
        assert name in ("run", "launch") or "--help" in flags or len(flags) > 1  # the pattern matches the help


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish not installed")
def test_fish_completes_the_same(scripts, tmp_path):
    (tmp_path / "runs.yaml").touch()
    cases = {
        "areno pl": ["plan", "plot"],
        "areno train --no-shu": ["--no-shuffle"],
        "areno train --algo gr": ["grpo"],
        "areno train --ckpt ru": ["runs.yaml"],
        "areno train --lr ": [],
        "areno completion ": ["bash", "fish", "zsh"],
    }
    for line, words in cases.items():
        command = f"source {scripts / 'fish'}; complete -C '{line}'"
        done = subprocess.run(["fish", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert [each.split("\t")[0] for each in done.stdout.splitlines()] == words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh not installed")
def test_zsh_parses_its_script(scripts):
    assert subprocess.run(["zsh", "-n", str(scripts / "zsh")], timeout=60).returncode == 0


def test_another_shell_is_a_usage_error(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
