"""Start an inference server for a replica, or join one that runs."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
from transformers import AutoConfig

from areno.config.paths import base_of
from areno.engine.limits import context_length
from areno.engine.parallel.workers import Processes
from areno.errors import EngineError, UsageError
from areno.rollouts.servers.calls import SERVED_NAME, ServerCalls
from areno.rollouts.servers.launch import HOST, PORT
from areno.rollouts.servers.process import ServerProcess
from areno.rollouts.servers.replica import Joined, ServerReplica
from areno.rollouts.servers.sglang import SglangCalls
from areno.rollouts.servers.vllm import VllmCalls

Product = Literal["vllm", "sglang"]

_EXTENSION = Path(__file__).parent / "extension"
_WORKER = "areno_vllm_worker.ArenoWorker"
_OWN_WORKER = "--worker-extension-cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The inference servers of a fleet.

    Attributes:
        arguments: what the section of the product gives on the command line.
        command: that starts a server; empty takes the product's own from PATH or this Python.
        addresses: of servers that run already, one per replica; none are started then.
        adapter: name that the trainer's adapter gets; empty where it has none.
    """

    product: Product
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    api_key: str = ""
    adapter: str = ""
    gpu: bool = False  # the servers compute on GPUs
    request_timeout_s: float = 3600.0

    @property
    def elsewhere(self) -> bool:
        """Whether a server that is joined may be on another machine, which shares folders at most."""
        hosts = {urlsplit(address).hostname for address in self.addresses}
        return bool(hosts - {"localhost", "127.0.0.1", "::1"})


def open_server(
    path: str,
    number: int,
    options: ServerOptions,
    devices: Sequence[torch.device] | None,
    processes: Processes,
    on_failure: Callable[[EngineError], None],
) -> ServerReplica:
    """Replica ``number``: its server started or joined, healthy, with the weights of ``path`` as version 0.

    Raises UsageError: the product is not installed; EngineError: the server ended, or was not healthy in time.
    """
    own_worker = _has_own_worker(options)
    calls: ServerCalls = VllmCalls(extended=not own_worker) if options.product == "vllm" else SglangCalls()
    server: ServerProcess | Joined
    if options.addresses:
        url, server = options.addresses[number], Joined(on_failure)
    else:
        command = [*command_of(options), *_arguments(path, options)]
        environment = environment_of(options, processes.threads or 1, devices) | dict(processes.environment)
        server = ServerProcess(command, environment, processes, on_failure)
        url = server.url
    return ServerReplica(
        path,
        url,
        calls,
        server,
        startup_s=processes.startup_s or 300.0,
        timeout_s=options.request_timeout_s,
        vocab_size=AutoConfig.from_pretrained(base_of(path)).get_text_config().vocab_size,
        api_key=options.api_key,
    )


def context_length_of(path: str) -> int | None:
    """Most tokens of a sequence, as the model of a checkpoint states it."""
    return context_length(AutoConfig.from_pretrained(base_of(path)))


def command_of(options: ServerOptions) -> list[str]:
    """What starts a server, without arguments. Raises UsageError: it is not installed."""
    if options.command:
        return list(options.command)
    if options.product == "sglang":
        command = [sys.executable, "-m", "sglang.launch_server"]
        found = command[0] if importlib.util.find_spec("sglang") is not None else None
    else:
        found = shutil.which(
            "vllm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        )
        command = [str(found), "serve"]
    if found is None:
        example = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server"}[options.product]
        raise UsageError(
            f"{options.product} is not installed here; install it, name the command of another environment, such as "
            f"'/PATH/bin/{example}' ({options.product}.command of an experiment, --rollout-server-command), join servers that "
            "run (rollout.api_url, --rollout-url), or let areno's own engine generate (rollout.backend=areno:dN)"
        )
    return command


def _has_own_worker(options: ServerOptions) -> bool:
    return any(word.partition("=")[0] == _OWN_WORKER for word in options.arguments)


def _arguments(path: str, options: ServerOptions) -> list[str]:
    where = ["--host", HOST, "--port", PORT, "--served-model-name", SERVED_NAME]
    if options.product == "sglang":
        weights = ["--model-path", path, "--weight-version", "0"]
        return [*weights, *where, *options.arguments]
    needed = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    extension = [_OWN_WORKER, _WORKER, "--weight-transfer-config", '{"backend": "areno"}']
    worker = [] if _has_own_worker(options) else extension
    return [path, *where, *needed, *worker, *options.arguments]


def environment_of(options: ServerOptions, threads: int, devices: Sequence[torch.device] | None) -> dict[str, str]:
    """Variables that a server needs, which a user's own come on top of; without ``devices`` a launcher gives it its own."""
    chosen = {}
    if devices is not None:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(str(device.index) for device in devices)
    if options.product == "vllm":
        paths = [str(_EXTENSION), os.environ.get("PYTHONPATH", "")]
        chosen |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_SERVER_DEV_MODE": "1",  # pauses and weight updates
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not options.gpu:
            chosen |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            chosen["OMP_NUM_THREADS"] = str(threads)
    return chosen
