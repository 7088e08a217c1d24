"""Options of ``areno serve`` and ``areno chat``: checked before anything is loaded, all errors at once, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areno.cli.main import main
from areno.config import TrainOptions
from areno.config.options import options_of
from areno.config.packages import install_command
from areno.config.serve_options import ChatOptions, ServeOptions, is_loopback, parse_chat, parse_serve
from areno.errors import UsageError


@pytest.fixture
def model(tiny_checkpoint):
    return str(tiny_checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model-path is required"),
        (["--model-path", "./gone"], "--model-path folder does not exist: ./gone"),
        (["MODEL", "--port", "70000"], "--port must be at most 65535, got 70000"),
        (["MODEL", "--world-size", "3", "--tp-size", "2"], "--world-size must be divisible by --tp-size, got 3 and 2"),
        (
            ["MODEL", "--host", "0.0.0.0"],
            "--host 0.0.0.0 is reachable from other machines and needs an API key",
        ),
        (["MODEL", "--host", "example.org"], "is reachable from other machines"),
        (["MODEL", "--api-key", ""], "--api-key must be printable ASCII"),
        (["MODEL", "--api-key", "a b"], "--api-key must be printable ASCII"),
        (["MODEL", "--cors-origin", "example.org"], "--cors-origin 'example.org' is not an origin"),
        (["MODEL", "--allowed-host", "http://example.org"], "--allowed-host 'http://example.org' is not a host name"),
        (["MODEL", "--allowed-host", "a.org", "--api-key", "k"], "--allowed-host has no effect with an API key"),
        (["MODEL", "--max-connections", "0"], "--max-connections must be positive"),
        (["MODEL", "--request-timeout-s", "0"], "--request-timeout-s must be positive"),
        (["MODEL", "--device", "tpu"], "--device 'tpu' is unknown"),
        (["MODEL", "--max-queue", "-1"], "--max-queue must be non-negative, got -1"),
        (["MODEL", "--max-running-prompts", "0"], "--max-running-prompts must be positive"),
        (["MODEL", "--served-model-name", ""], "--served-model-name must not be empty"),
        (["MODEL", "--drain-timeout", "1"], "--drain-timeout is not an option (did you mean --drain-timeout-s?)"),
        (["MODEL", "--drain-timeout-s", "nan"], "--drain-timeout-s nan is not a finite number"),
    ],
)
def test_invalid_options_are_one_error_message(model, capsys, options, message):
    argv = [part for option in options for part in (("--model-path", model) if option == "MODEL" else (option,))]
    assert main(["serve", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_all_errors_are_reported_together(model, capsys):
    assert main(["serve", "--model-path", model, "--port", "-1", "--host", "::"]) == 2
    assert capsys.readouterr().err.startswith("error: 2 problems:\n  1. --port must be non-negative, got -1")


def test_defaults_and_names(model, monkeypatch):
    options = parse_serve(["--model-path", model])
    assert (options.host, options.port, options.max_running_prompts, options.max_queue) == ("127.0.0.1", 8000, 16, 256)
    assert (options.default_max_tokens, options.decode_progress_interval_s, options.api_key) == (1024, 0.0, None)
    assert options.model_name == model
    assert parse_serve(["--model-path", model, "--served-model-name", "m"]).model_name == "m"
    monkeypatch.setenv("ARENO_API_KEY", "from-environment")
    assert parse_serve(["--model-path", model, "--host", "0.0.0.0"]).api_key == "from-environment"
    assert parse_serve(["--model-path", model, "--api-key", "own"]).api_key == "own"
    assert parse_chat(["--base-url", "http://x/v1"]).api_key == "from-environment"


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True)]
)
def test_addresses_of_this_machine(host, is_local):
    assert is_loopback(host) is is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org", ""])
def test_addresses_of_other_machines(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass either --model-path"),
        (["--base-url", "http://x/v1", "MODEL"], "pass either --model-path"),
        (["--base-url", "localhost:8000"], "--base-url 'localhost:8000' is not a URL"),
        (["--base-url", "http://x/v1", "--device", "cpu"], "--device has no effect with --base-url"),
        (["MODEL", "--model", "x"], "--model has no effect with --model-path"),
        (["MODEL", "--temperature", "-1"], "--temperature must be non-negative"),
    ],
)
def test_invalid_chat_options_are_one_error_message(model, options, message):
    argv = [part for option in options for part in (("--model-path", model) if option == "MODEL" else (option,))]
    with pytest.raises(UsageError) as caught:
        parse_chat(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("declaration", [ServeOptions, ChatOptions])
def test_options_shared_with_training_keep_their_meaning(declaration):
    theirs = {entry.name: entry for entry in options_of(TrainOptions)}
    for entry in options_of(declaration):
        if entry.name in theirs and entry.name not in ("max_running_prompts", "temperature", "seed"):
            assert (entry.kind, entry.many, entry.default) == (
                *(theirs[entry.name].kind, theirs[entry.name].many),
                theirs[entry.name].default,
            )


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_help_loads_no_torch(command):
    code = (
        f"import sys; from areno.cli.main import main; assert main(['{command}', '--help']) == 0\n"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"usage: areno {command} ")
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_server_listens_before_torch_is_loaded():
    code = "import sys, areno.serving.server; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_missing_packages_are_named(model, capsys, monkeypatch):
    from importlib import util

    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in ("fastapi", "uvicorn") else real(name))
    assert main(["serve", "--model-path", model]) == 2
    assert f"areno serve needs the packages fastapi, uvicorn; install them: {install_command('serve')}" in (
        capsys.readouterr().err
    )


def test_another_commands_name_for_the_model_option_gets_a_hint(capsys):
    assert main(["serve", "--ckpt", "somewhere"]) == 2
    assert "--ckpt is not an option; in this command, the option is called --model-path" in capsys.readouterr().err
    assert main(["eval", "--model-path", "somewhere"]) == 2
    assert "--model-path is not an option; in this command, the option is called --ckpt" in capsys.readouterr().err
