"""Options of ``areno serve`` and ``areno chat``. Options with the same name as in ``areno train`` have the same meaning."""

import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areno.config.all_train_options import TrainOptions
from areno.config.eval_options import option_from
from areno.config.options import flag_of, option
from areno.config.parser import CommandOptions, CommandText, parse_command
from areno.config.paths import ckpt_problem
from areno.config.rollout_options import RolloutOptions
from areno.config.run_options import BasicOptions
from areno.config.validate import shared_problems, value_problems
from areno.storage.run_layout import newest_model

SERVE = CommandText(
    "areno serve",
    "areno serve --model-path MODEL [--host ADDRESS] [--port N] [options]",
    "Serve a model over an OpenAI-compatible HTTP API: chat, completions, streaming, tools and structured output.",
)

CHAT = CommandText(
    "areno chat",
    "areno chat (--model-path MODEL | --base-url URL) [options]",
    "Chat with a model in the terminal. If input is piped, each line is a question, and only the answers are printed.",
    "While chatting, /reset clears the conversation, /system TEXT sets the system message, and /quit exits. "
    "Every on/off option --NAME can be turned off with --no-NAME.",
)

API_KEY_VARIABLE = "ARENO_API_KEY"
"""Environment variable to use instead of ``--api-key``, which is visible in the process list."""

_basic = partial(option, group="Basic")
_rollout = partial(option, group="Rollout")

_MODEL_HELP = "Model: a folder in Hugging Face format, a .gguf file, a repo id, or a run directory (its newest model)."


@dataclass(frozen=True, kw_only=True)
class ServeOptions(CommandOptions):
    """All options of ``areno serve``."""

    model_path: str | None = _basic(None, help=f"{_MODEL_HELP} Required.")
    served_model_name: str | None = _basic(
        None, unset="the value of --model-path", help="Name of the model in requests and responses."
    )
    host: str = _basic("127.0.0.1", help="Address to listen on; any address other than loopback needs --api-key.")
    port: int = _basic(8000, minimum=0, maximum=65535, help="Port to listen on; 0 picks a free port.")
    api_key: str | None = _basic(
        None,
        unset=f"the environment variable {API_KEY_VARIABLE}, or none",
        help="Bearer token that clients must send.",
    )
    cors_origin: tuple[str, ...] = _basic(
        (), metavar="URL", help="Allow web pages of this origin to call the server. Repeatable; * allows all."
    )
    allowed_host: tuple[str, ...] = _basic(
        (),
        metavar="NAME",
        help="Additional host name that the Host header of requests may contain, such as the name of a reverse proxy. "
        "localhost is always allowed, and a server with an API key allows every name. Repeatable; * allows all.",
    )
    max_connections: int = _basic(512, minimum=1, help="Maximum open connections; further connections get status 503.")
    world_size: int = option_from(BasicOptions, "world_size", documented_default="")
    tp_size: int = option_from(BasicOptions, "tp_size", documented_default="")
    device: str = option_from(BasicOptions, "device")
    dtype: str = option_from(BasicOptions, "dtype")
    trust_remote_code: bool = option_from(BasicOptions, "trust_remote_code")
    drain_timeout_s: float = _basic(
        30.0,
        minimum=0,
        help="On SIGTERM or SIGINT, wait at most this many seconds for running requests, and then cancel unfinished "
        "requests.",
    )

    max_running_prompts: int = option_from(RolloutOptions, "max_running_prompts", default=16, unset="")
    max_queue: int = _rollout(256, minimum=0, help="Maximum queued samples; further requests get status 429.")
    max_prompt_chars: int | None = _rollout(
        None,
        minimum=1,
        unset="16 characters per token of the context length, at least 65536",
        help="Maximum characters of a request; longer requests are rejected before tokenization.",
    )
    request_timeout_s: float | None = _rollout(
        None,
        above=0,
        unset="none",
        help="Timeout of a request, in seconds. A request that exceeds the timeout gets a response with status 504.",
    )
    default_max_tokens: int = _rollout(
        1024, minimum=1, help="Maximum tokens of a response if the request sets no limit."
    )
    kv_cache_tokens: int | None = option_from(RolloutOptions, "kv_cache_tokens")
    prefix_cache_tokens: int | None = _rollout(
        None,
        minimum=0,
        unset="a quarter of the KV cache",
        help="Size in tokens of the prefix cache, which avoids recomputing continued conversations; 0 disables the cache.",
    )
    eager_decode: bool = option_from(RolloutOptions, "eager_decode")
    speculate: int = option_from(RolloutOptions, "speculate")
    attn_backend: str = option_from(RolloutOptions, "attn_backend")
    disable_thinking: bool = option_from(RolloutOptions, "disable_thinking")
    tool_call_parser: str = _rollout(
        "auto",
        help="Format of the model's tool calls. With the value auto, areno detects the format from the chat template.",
    )
    reasoning_parser: str = _rollout(
        "auto",
        help="Format of the model's reasoning. With the value auto, areno detects the format from the chat template. With the "
        "value none, the reasoning is not separated from the text of the response.",
    )

    decode_progress_interval_s: float = option(
        0.0,
        group="Observability",
        minimum=0,
        help="Interval in seconds between log lines about decode speed; 0 disables these lines.",
    )

    @property
    def model_name(self) -> str:
        """Name of the model in requests and responses."""
        return self.served_model_name or str(self.model_path)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(CommandOptions):
    """All options of ``areno chat``."""

    model_path: str | None = _basic(None, help=f"{_MODEL_HELP} Loaded in this process.")
    base_url: str | None = _basic(
        None, metavar="URL", help="Address of a running server, such as http://127.0.0.1:8000/v1."
    )
    model: str | None = _basic(
        None, unset="the server's first model", help="Name of the model on the server. Requires --base-url."
    )
    api_key: str | None = _basic(
        None,
        unset=f"the environment variable {API_KEY_VARIABLE}, or none",
        help="API key of the server. Requires --base-url.",
    )
    device: str = option_from(BasicOptions, "device")
    dtype: str = option_from(BasicOptions, "dtype")
    trust_remote_code: bool = option_from(BasicOptions, "trust_remote_code")

    system: str | None = _rollout(None, unset="none", help="System message.")
    messages: str | None = _rollout(
        None,
        metavar="FILE.json",
        unset="none",
        help="File with the initial messages of a conversation, such as few-shot examples: a JSON list of objects with "
        "role and content. --system replaces a system message in the list.",
    )
    max_tokens: int = _rollout(1024, minimum=1, help="Maximum tokens of an answer.")
    temperature: float = _rollout(1.0, minimum=0, help="Sampling temperature; 0 decodes greedily.")
    top_p: float = option_from(RolloutOptions, "top_p")
    top_k: int = option_from(RolloutOptions, "top_k")
    seed: int | None = _rollout(
        None, minimum=0, unset="random", help="Seed of sampling; the same seed reproduces the answers."
    )
    disable_thinking: bool = option_from(RolloutOptions, "disable_thinking")
    kv_cache_tokens: int | None = option_from(RolloutOptions, "kv_cache_tokens")
    attn_backend: str = option_from(RolloutOptions, "attn_backend")


def parse_serve(argv: Sequence[str]) -> ServeOptions:
    """Parse and check the arguments of ``areno serve``."""
    return parse_command(argv, ServeOptions, SERVE, _served, _serve_problems)


def parse_chat(argv: Sequence[str]) -> ChatOptions:
    """Parse and check the arguments of ``areno chat``."""
    return parse_command(argv, ChatOptions, CHAT, _resolved, _chat_problems)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _served(options: ServeOptions) -> ServeOptions:
    name = options.model_path if options.served_model_name is None else options.served_model_name
    return replace(_resolved(options), served_model_name=name)


def _resolved(options: Any) -> Any:
    """In ``model_path``, replace a run directory with the path of its newest model.

    If no API key is set, use the key in the environment, if any.
    """
    path, key = options.model_path, options.api_key
    key = os.environ.get(API_KEY_VARIABLE) or None if key is None else key
    return replace(options, model_path=path and newest_model(path, "--model-path"), api_key=key)


def _serve_problems(options: ServeOptions) -> Iterator[str]:
    if not options.model_path:
        yield "--model-path is required; give a model folder, a run directory or a repo id such as Qwen/Qwen3-0.6B"
    else:
        yield ckpt_problem(options.model_path, "--model-path")
    yield from value_problems(options)
    yield from shared_problems(
        TrainOptions(device=options.device, world_size=options.world_size, tp_size=options.tp_size)
    )
    if options.served_model_name == "":
        yield "--served-model-name must not be empty; pass a name, or omit the option"
    yield from key_problems(options.host, options.api_key)
    yield from _origin_problems(options)


def key_problems(host: str, key: str | None) -> Iterator[str]:
    """Yield problems with the API key of a server on ``host``. Hosts other than loopback addresses need a key."""
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        yield "--api-key must be printable ASCII without spaces; create a key with `openssl rand -hex 24`"
    if key is None and not is_loopback(host):
        yield (
            f"--host {host} is reachable from other machines and needs an API key; pass --api-key, set "
            f"{API_KEY_VARIABLE}, or use --host 127.0.0.1"
        )


def _origin_problems(options: ServeOptions) -> Iterator[str]:
    if options.allowed_host and options.api_key is not None:
        yield (
            "--allowed-host has no effect with an API key, because the server then accepts any host name; use only one of "
            "them"
        )
    for host in options.allowed_host:
        if not host or {"/", " "} & set(host) or (":" in host and not _is_address(host)):
            yield f"--allowed-host {host!r} is not a host name; omit scheme and port, as in proxy.example.org"
    for origin in options.cors_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            yield f"--cors-origin {origin!r} is not an origin; write an origin such as https://example.org"


def _chat_problems(options: ChatOptions) -> Iterator[str]:
    if bool(options.model_path) == bool(options.base_url):
        yield (
            "pass either --model-path to load a model or --base-url to use a running server, such as "
            "--base-url http://127.0.0.1:8000/v1"
        )
    elif options.model_path:
        yield ckpt_problem(options.model_path, "--model-path")
        yield from _unused(options, ("model", "api_key"), "--model-path")
    else:
        if not str(options.base_url).startswith(("http://", "https://")):
            yield f"--base-url {options.base_url!r} is not a URL; write a URL such as http://127.0.0.1:8000/v1"
        names = ("device", "dtype", "trust_remote_code", "kv_cache_tokens", "attn_backend")
        yield from _unused(options, names, "--base-url")
    yield from value_problems(options)
    yield from shared_problems(TrainOptions(device=options.device))


def _unused(options: ChatOptions, names: Sequence[str], other: str) -> Iterator[str]:
    for name in names:
        if name in options.explicit:
            yield f"{flag_of(name)} has no effect with {other}; use only one of them"
