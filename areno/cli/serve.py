"""``areno serve``: an OpenAI-compatible HTTP server over the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from areno.config.packages import require_packages
from areno.config.serve_options import ServeOptions, parse_serve
from areno.observability.logs import setup_logging

if TYPE_CHECKING:
    from areno.engine.backend import Backend


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse_serve(argv)
    require_packages("serve", "areno serve needs")
    from areno.serving.server import ForegroundServer, listen
    from areno.serving.service import Service, ServingConfig

    shared = {
        entry.name: getattr(options, entry.name) for entry in fields(ServingConfig) if hasattr(options, entry.name)
    }
    hosts = tuple(host.lower() for host in options.allowed_host)
    config = ServingConfig(**shared, cors_origins=options.cors_origin, allowed_hosts=hosts)
    sock = listen(options.host, options.port)
    _check_checkpoint(options)
    with setup_logging(None):
        ForegroundServer(
            Service(config),
            lambda: load_engine(options),
            sock,
            options.drain_timeout_s,
            _print_status,
        ).serve()
    return 0


def _print_status(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the server does not need a reader, as in `areno serve | head -1`
        print(f"areno serve: {text}")


def _check_checkpoint(options: ServeOptions) -> None:
    """Check tokenizer, model configuration and output parsers before the weights are loaded."""
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


def load_engine(options: ServeOptions) -> Backend:
    """Load the model of ``--model-path`` for inference only."""
    from areno.api.backend.base import ArenoConfig
    from areno.api.backend.local import prepare

    names = ["attn_backend", "kv_cache_tokens", "device", "dtype", "trust_remote_code"]
    names += ["eager_decode", "speculate", "prefix_cache_tokens"]
    config = ArenoConfig(
        runtime={name: getattr(options, name) for name in names} | {"trains": "nothing"},
        tp_size=options.tp_size,
        max_running_prompts=options.max_running_prompts,
        decode_progress_interval_s=options.decode_progress_interval_s,
    )
    return prepare(str(options.model_path), options.world_size, config)()
