"""Options of a fleet's vLLM or SGLang servers, and the command line and environment variables of a server.

:mod:`areno.config.experiment.server_arguments` converts settings of an experiment to command-line arguments.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
from transformers import AutoConfig

from areno.config.paths import base_of
from areno.engine.limits import context_length
from areno.errors import UsageError
from areno.rollouts.servers.calls import SERVED_NAME
from areno.rollouts.servers.run_supervised import HOST, PORT

Product = Literal["vllm", "sglang"]

_EXTENSION = Path(__file__).parent / "extension"
_WORKER = "areno_vllm_worker.ArenoWorker"
_WORKER_OPTION = "--worker-extension-cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the inference servers of a fleet.

    Attributes:
        arguments: command-line arguments of a server, in addition to those that :func:`arguments_of` adds.
        command: command that starts a server. If ``command`` is empty, areno runs the program ``vllm`` (in the folder of this
            Python interpreter, or in PATH) or the module ``sglang.launch_server``, depending on ``product``.
        addresses: running servers to join, one per replica. If empty, areno starts the servers.
        adapter: name of the trainer's adapter; empty without an adapter.
    """

    product: Product
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    api_key: str = ""
    adapter: str = ""
    gpu: bool = False  # whether the servers compute on GPUs
    request_timeout_s: float = 3600.0

    @property
    def elsewhere(self) -> bool:
        """Whether at least one server in ``addresses`` has an address other than a loopback address.

        Loopback addresses are ``localhost``, ``127.0.0.1`` and ``::1``. areno assumes that a server with another address is on
        another machine. Such a server can share folders with the trainer, but not memory.
        """
        hosts = {urlsplit(address).hostname for address in self.addresses}
        return bool(hosts - {"localhost", "127.0.0.1", "::1"})


def context_length_of(path: str) -> int | None:
    """Return the context length of a checkpoint's model in tokens. None if the model configuration has no context length."""
    return context_length(AutoConfig.from_pretrained(base_of(path)))


def command_of(options: ServerOptions) -> list[str]:
    """Return the first words of the command that starts a server, such as ``vllm serve``.

    :func:`arguments_of` returns the rest of the command.

    Raises UsageError if the server program (vLLM or SGLang) is not installed.
    """
    if options.command:
        return list(options.command)
    if options.product == "sglang":
        command = [sys.executable, "-m", "sglang.launch_server"]
        executable = command[0] if importlib.util.find_spec("sglang") is not None else None
    else:
        search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        executable = shutil.which("vllm", path=search_path)
        command = [str(executable), "serve"]
    if executable is None:
        example = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server"}[options.product]
        raise UsageError(
            f"{options.product} is not installed in this environment; install it, or name the command of another "
            f"installation, such as '/PATH/bin/{example}' (areno run: {options.product}.command, areno train: "
            "--rollout-server-command), or use running servers (areno run: rollout.api_url, areno train: --rollout-url), or "
            "use areno's own engine (areno run: rollout.backend=areno:d1, areno train: --rollout-backend areno)"
        )
    return command


def has_custom_worker(options: ServerOptions) -> bool:
    """Whether the arguments specify a vLLM worker extension, which replaces areno's extension."""
    return any(word.partition("=")[0] == _WORKER_OPTION for word in options.arguments)


def arguments_of(path: str, options: ServerOptions) -> list[str]:
    """Return the command-line arguments of a server for the model at ``path``."""
    where = ["--host", HOST, "--port", PORT, "--served-model-name", SERVED_NAME]
    if options.product == "sglang":
        weights = ["--model-path", path, "--weight-version", "0"]
        return [*weights, *where, *options.arguments]
    needed = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    extension = [_WORKER_OPTION, _WORKER, "--weight-transfer-config", '{"backend": "areno"}']
    worker = [] if has_custom_worker(options) else extension
    return [path, *where, *needed, *worker, *options.arguments]


def environment_of(options: ServerOptions, threads: int, devices: Sequence[torch.device] | None) -> dict[str, str]:
    """Return the default environment variables of a server. ``devices`` is None if the server runs on CPUs or if a launcher
    assigns the devices."""
    chosen = {}
    if devices is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(visible[d.index] if visible else str(d.index) for d in devices)
    if options.product == "vllm":
        paths = [str(_EXTENSION), os.environ.get("PYTHONPATH", "")]
        chosen |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_SERVER_DEV_MODE": "1",  # for pauses and weight updates
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not options.gpu:
            chosen |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            chosen["OMP_NUM_THREADS"] = str(threads)
    return chosen
