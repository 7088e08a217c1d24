"""Sections of generation: sampling, the rollout engine, agents."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areno.config.experiment.settings import section, setting, settings_of
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec
from areno.errors import UsageError

ADMIN_KEY = "one of its own per run"
"""What help says about keys: there is no default one that everybody knows."""

NO_GATEWAY = "services behind a gateway (_version v2) are not supported; remove it, or write _version=v1"
"""Why an engine has no ``_version`` v2."""

of_gateway = partial(setting, no_effect="read by services of _version v2 only")
"""Declares a setting of those services."""

loading_timeout = partial(setting, no_effect="setup_timeout limits starting and loading together")
"""Declares a limit on starting alone."""

_NO_BEAMS = "beam search is not supported; remove it, and sample or use greedy"
_SAMPLING = {"temperature": "temperature", "top_p": "top_p"}
_OPENAI_NAMES = {
    "completions": _SAMPLING
    | {
        "n_samples": "n",
        "max_new_tokens": "max_completion_tokens",
        "stop": "stop",
        "frequency_penalty": "frequency_penalty",
    },
    "responses": _SAMPLING | {"max_new_tokens": "max_output_tokens"},
    "openai-agents": _SAMPLING | {"max_new_tokens": "max_tokens", "frequency_penalty": "frequency_penalty"},
}


@dataclass
class GenerationHyperparameters:
    """How text is sampled."""

    n_samples: int = setting(1, minimum=1, help="Answers per prompt; they make one group.")
    max_new_tokens: int = setting(16384, minimum=1, help="Most tokens of an answer.")
    min_new_tokens: int = setting(0, minimum=0, help="No end of sequence and no stop before this many tokens.")
    max_tokens: int = setting(32768, minimum=1, help="Most tokens of prompt and answer together.")
    greedy: bool = setting(False, help="Always take the most likely token.")
    top_p: float = setting(1.0, above=0, maximum=1, help="Sample from the most likely tokens with this much mass.")
    top_k: int = setting(100_000_000, minimum=1, help="Sample from this many most likely tokens.")
    temperature: float = setting(1.0, above=0, help="Sampling temperature; log-probs are those of the scaled policy.")
    stop_token_ids: list[int] = setting([], minimum=0, help="Token ids that end an answer, besides the model's own.")
    ignore_eos: bool = setting(False, help="Go on after an end-of-sequence token.")
    skip_special_tokens: bool = setting(True, help="Leave special tokens out of the decoded text.")
    stop: list[str] | None = setting(None, help="Texts that end an answer.")
    frequency_penalty: float = setting(
        0.0, minimum=-2, maximum=2, help="Lower a token's logit by this much for each time it was generated."
    )
    lora_name: str = setting("default_lora", help="Name under which the adapter is served.")
    use_beam_search: bool = setting(False, help="Search with beams instead of sampling.", refused=_NO_BEAMS)

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with some values changed."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy that also stops at the tokenizer's end-of-sequence and padding tokens."""
        special = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        added = [token for token in special if token is not None and token not in self.stop_token_ids]
        return self.new(stop_token_ids=[*self.stop_token_ids, *dict.fromkeys(added)])

    def to_openai_args_dict(self, exclude_args: Sequence[str] = (), api_format: str = "completions") -> dict[str, Any]:
        """Return the values as keyword arguments of an OpenAI client; what it has no name for is named in a warning.

        Args:
            exclude_args: settings to leave out.
            api_format: ``completions``, ``responses`` or ``openai-agents``.

        Raises:
            UsageError: the format is unknown.
        """
        if api_format not in _OPENAI_NAMES:
            raise UsageError(f"api_format {api_format!r} is unknown; choose {', '.join(_OPENAI_NAMES)}")
        names = _OPENAI_NAMES[api_format]
        values = {name: getattr(self, name) for name in settings_of(type(self)) if name not in exclude_args}
        if values.pop("greedy", False):
            values["temperature"] = 0.0
        defaults = {name: entry.default for name, entry in settings_of(type(self)).items()}
        lost = [name for name, value in values.items() if name not in names and value != defaults[name]]
        if lost:
            warnings.warn(f"OpenAI's {api_format} have no {', '.join(lost)}; left out", stacklevel=2)
        given = {names[name]: value for name, value in values.items() if name in names}
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class AgentConfig:
    """Agents: how they are run, and how their conversations become rows to train on."""

    agent_cls_path: str = setting(
        "", help="The agent as module.Class or file.py:NAME, with async run(data, ...); empty takes the workflow's."
    )
    admin_api_key: str = setting(
        "",
        shown=ADMIN_KEY,
        help="Key that manages sessions at the proxy. It cannot ask for completions.",
        no_effect="only the trainer opens and ends sessions, which needs no key",
    )
    scheduling_spec: list[SchedulingSpec] = section(one_spec, help="What the agent's process needs; exactly one.")
    mode: str = setting(
        "inline",
        choices=("inline", "subproc", "online"),
        help="inline runs agents in the rollout process, subproc in killable processes.",
        refused_values={
            "online": "sessions from outside (online) are not supported; write mode=inline or mode=subproc, with an agent of "
            "yours"
        },
    )
    tool_call_parser: str = setting("qwen", help="How tool calls are read from an answer.")
    reasoning_parser: str = setting("qwen3", help="How reasoning is parted from an answer.")
    chat_template_type: str = setting(
        "hf",
        choices=("hf", "concat"),
        help="hf renders each request with the chat template; concat appends to the tokens of the request before.",
    )
    engine_max_tokens: int | None = setting(
        None, minimum=1, help="Most tokens of prompt and completion in a session; null takes gconfig.max_tokens."
    )
    turn_discount: float = setting(
        1.0, minimum=0, maximum=1, help="Factor by which a turn inherits the reward of the turn after it."
    )
    export_style: str = setting(
        "individual",
        choices=("individual", "concat"),
        help="individual makes a row of each interaction; concat one of each conversation (needs chat_template_type).",
    )
    subproc_max_workers: int = setting(4, minimum=1, help="Most processes of mode subproc.")
    session_timeout_seconds: int = setting(3600, minimum=1, help="A session idle for so long is closed.")
    set_reward_finish_timeout: float = setting(
        0.0, minimum=0, help="Seconds to wait for further rewards after a session has ended."
    )


@dataclass
class InferenceEngineConfig:
    """Rollout: the engine that generates, how far it may run ahead, and the agents on top."""

    experiment_name: str | None = setting(None, inherits="experiment_name", help="Written once, at the top.")
    trial_name: str | None = setting(None, inherits="trial_name", help="Written once, at the top.")
    fileroot: str | None = setting(None, inherits="cluster.fileroot", help="Root of logs and dumps.")
    max_concurrent_rollouts: int | None = setting(
        None,
        minimum=1,
        inherits="rollout.consumer_batch_size",
        shown="rollout.consumer_batch_size",
        help="Most prompt groups in work at the same time.",
    )
    queue_size: int | None = setting(
        None, minimum=1, help="Most finished groups that wait; null is as many as staleness allows."
    )
    consumer_batch_size: int = setting(
        0,
        minimum=1,
        inherits="train_dataset.batch_size",
        shown="train_dataset.batch_size",
        help="Prompt groups that one training step takes.",
    )
    max_head_offpolicyness: int = setting(
        0, minimum=0, help="How many versions ahead of training a rollout may be admitted; 0 is synchronous training."
    )
    max_staleness: int | None = setting(
        None,
        minimum=0,
        help="Exact bound: a trajectory with a token older than this many versions is not trained on; null sets none.",
    )
    on_stale: str = setting(
        "drop", choices=("drop", "regenerate"), help="What max_staleness does with a trajectory that is too old."
    )
    enable_rollout_tracing: bool = setting(False, help="Log each generation request.")
    check_trajectory_format: bool = setting(False, help="Check what a workflow returns, with its keys and shapes.")
    tokenizer_path: str = setting("", inherits="tokenizer_path", shown="tokenizer_path", help="Tokenizer of dumps.")
    dump_to_file: bool = setting(False, help="Write every trajectory as text under the run directory.")
    setup_timeout: float = setting(300.0, above=0, help="Seconds that an engine may take to load.")
    workers_ready_timeout: float = loading_timeout(
        30.0, above=0, help="Seconds that a worker process may take to answer."
    )
    request_timeout: float = setting(3600.0, above=0, help="Seconds that one generation may take.")
    request_retries: int = setting(3, minimum=0, help="How often a failed request is repeated.")
    pause_grace_period: float = setting(
        0.0,
        minimum=0,
        help="Seconds to wait after generation is paused.",
        no_effect="a weight update stops generation between two tokens and drops no request",
    )
    scheduling_spec: list[SchedulingSpec] = section(one_spec, help="What a rollout worker needs; one or two.")
    backend: str = setting(
        "", required=True, help="Engine and parallelism, such as areno:d2 (areno is the engine here)."
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, help="Whether rollout has its own devices.")
    use_lora: bool = setting(
        False, inherits="actor.use_lora", shown="actor.use_lora", help="Serve the actor's adapter instead of weights."
    )
    lora_name: str = setting(
        "", inherits="gconfig.lora_name", shown="gconfig.lora_name", help="Name under which the adapter is served."
    )
    agent: AgentConfig = section(AgentConfig, help="Agents on top of the engine.")
    speculate: int = setting(
        0,
        minimum=0,
        maximum=63,
        help="Tokens to guess ahead by prompt lookup; answers stay the same. Pays for large models and few sequences.",
    )
    return_routed_experts: bool = setting(
        False,
        help="Return which experts each token was routed to.",
        refused="expert routing is not returned; remove it",
    )
    _version: str = setting(
        "v1", choices=("v1", "v2"), help="v2 runs rollout as services behind a gateway.", refused=NO_GATEWAY
    )
    model: str = of_gateway("default", help="Model name that a gateway shows.")
    routing_strategy: str = of_gateway("round_robin", help="How a router spreads requests.")
    poll_interval: float = of_gateway(5.0, above=0, help="Seconds between a router's health checks.")
    admin_api_key: str = of_gateway("", shown=ADMIN_KEY, help="Key of the services of v2.")
    api_url: str | None = setting(
        None,
        help="OpenAI-compatible server outside that generates.",
        refused="generating with an outside server is not supported; remove it, and use areno:dN",
    )
    provider_api_key: str | None = setting(
        None, help="Key of that server.", refused="generating with an outside server is not supported; remove it"
    )
