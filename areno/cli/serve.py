"""``areno serve``: an OpenAI-compatible HTTP server over the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areno.config.packages import install_command, missing_server_packages
from areno.config.serve_options import ChatOptions, ServeOptions, parse_serve
from areno.errors import UsageError
from areno.observability.logs import setup_logging

if TYPE_CHECKING:
    from areno.engine.backend import Backend


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after ``serve``.

    Returns:
        The exit code: 0 after an orderly end.

    Raises:
        UsageError: the input cannot work.
    """
    options = parse_serve(argv)
    need_server_packages("areno serve")
    from areno.serving.server import listen, serve_process
    from areno.serving.service import Service, ServingConfig

    config = ServingConfig(
        model_name=options.model_name,
        default_max_tokens=options.default_max_tokens,
        max_queue=options.max_queue,
        api_key=options.api_key,
        disable_thinking=options.disable_thinking,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        cors_origins=options.cors_origin,
        allowed_hosts=tuple(host.lower() for host in options.allowed_host),
        max_connections=options.max_connections,
        max_prompt_chars=options.max_prompt_chars,
        request_timeout_s=options.request_timeout_s,
    )
    sock = listen(options.host, options.port)
    _check_checkpoint(options)
    with setup_logging(None):
        serve_process(
            Service(config),
            lambda: _load(options),
            sock,
            drain_timeout_s=options.drain_timeout_s,
            say=lambda text: print(f"areno serve: {text}", flush=True),
        )
    return 0


def _check_checkpoint(options: ServeOptions) -> None:
    """Tokenizer, configuration and formats of the answers, all before the weights are loaded."""
    from areno.config.paths import tokenizer_of
    from areno.engine.limits import check_tokenizer
    from areno.text.chat import load_tokenizer
    from areno.text.reasoning import reasoning_parser_for
    from areno.text.tool_calls.registry import parser_for

    path, trusted = str(options.model_path), options.trust_remote_code
    tokenizer = load_tokenizer(tokenizer_of(path), trust_remote_code=trusted)
    check_tokenizer(tokenizer, path, option="--model-path", trust_remote_code=trusted)
    parser_for(tokenizer, options.tool_call_parser)
    reasoning_parser_for(tokenizer, options.reasoning_parser)


def _load(options: ServeOptions) -> Backend:
    return load_engine(
        options,
        max_running=options.max_running_prompts,
        decode_progress_interval_s=options.decode_progress_interval_s,
        eager_decode=options.eager_decode,
        speculate=options.speculate,
        prefix_cache_tokens=options.prefix_cache_tokens,
        world_size=options.world_size,
        tp_size=options.tp_size,
    )


def load_engine(
    options: ServeOptions | ChatOptions,
    *,
    max_running: int,
    decode_progress_interval_s: float = 0.0,
    eager_decode: bool = False,
    speculate: int = 0,
    prefix_cache_tokens: int | None = None,
    world_size: int = 1,
    tp_size: int = 1,
) -> Backend:
    """Load the model of ``--model-path`` to generate, without anything that training needs.

    Raises:
        UsageError: the checkpoint or the device cannot be used.
    """
    from areno.api.backend.base import ArenoConfig
    from areno.api.backend.local import prepare

    names = ("attn_backend", "kv_cache_tokens", "device", "dtype", "trust_remote_code")
    runtime = {name: getattr(options, name) for name in names}
    config = ArenoConfig(
        runtime={
            **runtime,
            "eager_decode": eager_decode,
            "speculate": speculate,
            "prefix_cache_tokens": prefix_cache_tokens,
            "trains": "nothing",
        },
        tp_size=tp_size,
        max_running_prompts=max_running,
        decode_progress_interval_s=decode_progress_interval_s,
    )
    return prepare(str(options.model_path), world_size, config)()


def need_server_packages(command: str) -> None:
    """Check that the optional packages of the server are there.

    Raises:
        UsageError: one is missing.
    """
    missing = missing_server_packages()
    if missing:
        raise UsageError(f"{command} needs the packages {', '.join(missing)}; install them: {install_command('serve')}")
