"""Starts the inference server of a replica, or joins a running server."""

from collections.abc import Callable, Sequence

import torch
from transformers import AutoConfig

from areno.config.paths import base_of
from areno.engine.parallel.workers import Processes
from areno.errors import EngineError
from areno.rollouts.servers.calls import ServerCalls
from areno.rollouts.servers.command_line import (
    ServerOptions,
    arguments_of,
    command_of,
    environment_of,
    has_custom_worker,
)
from areno.rollouts.servers.process import InferenceServerProcess
from areno.rollouts.servers.replica import ExternalServer, ServerReplica
from areno.rollouts.servers.sglang_client import SglangCalls
from areno.rollouts.servers.vllm_client import VllmCalls


def open_server(
    path: str,
    number: int,
    options: ServerOptions,
    devices: Sequence[torch.device] | None,
    processes: Processes,
    on_failure: Callable[[EngineError], None],
) -> ServerReplica:
    """Start the server of replica ``number``, or connect to it if it is already running (see ``options.addresses``). Wait until
    the server is healthy.

    The weights in ``path`` have version 0.

    Raises:
        UsageError: the server program (vLLM or SGLang) is not installed.
        EngineError: the server exited, or was not healthy in time.
    """
    transfers, joined = not has_custom_worker(options), bool(options.addresses)
    calls: ServerCalls = VllmCalls(transfers=transfers, joined=joined) if options.product == "vllm" else SglangCalls()
    vocab_size = AutoConfig.from_pretrained(base_of(path)).get_text_config().vocab_size
    server: InferenceServerProcess | ExternalServer
    if options.addresses:
        url, server = options.addresses[number], ExternalServer(on_failure)
    else:
        command = [*command_of(options), *arguments_of(path, options)]
        environment = environment_of(options, processes.threads or 1, devices) | dict(processes.environment)
        server = InferenceServerProcess(command, environment, processes, on_failure)
        url = server.url
    try:
        return ServerReplica(
            path,
            url,
            calls,
            server,
            startup_s=processes.startup_s or 300.0,
            timeout_s=options.request_timeout_s,
            vocab_size=vocab_size,
            api_key=options.api_key,
        )
    except BaseException:
        server.close()
        raise
