"""Configuration sections for sampling, the rollout engine and agents."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areno.config.experiment.setting_declaration import Problems, changed, ineffective, section, setting, settings_of
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec, worker_problems
from areno.config.saved_rollouts import kept_rollouts
from areno.errors import UsageError

ADMIN_KEY = "random for each run"
"""Default of API keys, as shown in help."""

NO_GATEWAY = "services behind a gateway (_version v2) are not supported; remove the setting, or set _version=v1"
"""Why ``_version`` v2 is rejected."""

of_gateway = partial(setting, no_effect="only read with _version v2, which is not supported")

start_timeout = partial(
    setting, no_effect="setup_timeout limits the total time for starting a worker and loading its model"
)

_NO_BEAMS = "beam search is not supported; remove the setting, and use sampling or greedy decoding"
_SAMPLING = {"temperature": "temperature", "top_p": "top_p"}
_PENALIZED = _SAMPLING | {"frequency_penalty": "frequency_penalty"}
_OPENAI_NAMES = {
    "completions": _PENALIZED | {"n_samples": "n", "max_new_tokens": "max_completion_tokens", "stop": "stop"},
    "responses": _SAMPLING | {"max_new_tokens": "max_output_tokens"},
    "openai-agents": _PENALIZED | {"max_new_tokens": "max_tokens"},
}


@dataclass
class GenerationHyperparameters:
    """Sampling parameters."""

    n_samples: int = setting(1, "Number of answers per prompt (the group size).", minimum=1)
    max_new_tokens: int = setting(16384, "Maximum number of tokens in an answer.", minimum=1)
    min_new_tokens: int = setting(
        0,
        "Minimum number of tokens before an end-of-sequence or stop token can be sampled. A stop text can "
        "still end an answer earlier.",
        minimum=0,
    )
    max_tokens: int = setting(32768, "Maximum number of tokens in prompt and answer together.", minimum=1)
    greedy: bool = setting(False, "Always take the most likely token.")
    top_p: float = setting(
        1.0,
        "Nucleus sampling: sample from the smallest set of most likely tokens that reaches this total probability.",
        above=0,
        maximum=1,
    )
    top_k: int = setting(100_000_000, "Number of most likely tokens to sample from.", minimum=1)
    temperature: float = setting(
        1.0, "Sampling temperature. Log-probs are computed from the temperature-scaled distribution.", above=0
    )
    stop_token_ids: list[int] = setting(
        [], "Token ids that end an answer, in addition to the model's end-of-sequence tokens.", minimum=0
    )
    ignore_eos: bool = setting(False, "Continue generating after an end-of-sequence token.")
    skip_special_tokens: bool = setting(True, "Remove special tokens from the decoded text.")
    stop: list[str] | None = setting(None, "Texts that end an answer.")
    frequency_penalty: float = setting(
        0.0,
        "Reduce a token's logit by this value for each earlier occurrence of the token in the answer.",
        minimum=-2,
        maximum=2,
    )
    lora_name: str = setting("default_lora", "Name under which the adapter is served.")
    use_beam_search: bool = setting(False, "Use beam search instead of sampling.", refused=_NO_BEAMS)

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy in which the given settings are changed."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy that also stops at the tokenizer's end-of-sequence and padding tokens."""
        special = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        added = [token for token in special if token is not None and token not in self.stop_token_ids]
        return self.new(stop_token_ids=[*self.stop_token_ids, *dict.fromkeys(added)])

    def to_openai_args_dict(self, exclude_args: Sequence[str] = (), api_format: str = "completions") -> dict[str, Any]:
        """Return the sampling parameters as keyword arguments for requests with an OpenAI client.

        Settings that OpenAI's API lacks are omitted. A warning names the omitted settings that differ from their defaults.

        Args:
            exclude_args: settings to leave out.
            api_format: ``completions``, ``responses`` or ``openai-agents``; any other value raises `UsageError`.
        """
        if api_format not in _OPENAI_NAMES:
            raise UsageError(f"api_format {api_format!r} is unknown; choose {', '.join(_OPENAI_NAMES)}")
        names = _OPENAI_NAMES[api_format]
        wanted = [name for name in settings_of(type(self)) if name not in exclude_args]
        if lost := [name for name in changed(self, wanted) if name not in (*names, "greedy")]:
            warnings.warn(
                f"OpenAI's {api_format} API does not support {', '.join(lost)}, so areno omits them", stacklevel=2
            )
        values = {names[name]: getattr(self, name) for name in wanted if name in names}
        if self.greedy and "greedy" in wanted:
            values["temperature"] = 0.0
        return {name: value for name, value in values.items() if value is not None}

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.min_new_tokens > self.max_new_tokens:
            yield (
                "min_new_tokens",
                f"{self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}; lower min_new_tokens",
            )
        if self.greedy:
            yield from ineffective(
                self, ("temperature", "top_p", "top_k"), "with greedy true; remove the setting, or set greedy to false"
            )
            if self.n_samples > 1:
                yield (
                    "n_samples",
                    f"{self.n_samples} makes no sense with greedy, which gives the same answer each time; use n_samples 1",
                )


@dataclass
class AgentConfig:
    """How agents run, and how their conversations become training rows."""

    agent_cls_path: str = setting(
        "",
        "Agent class with the method async run(data, ...), as module.Class or file.py:NAME. If empty, "
        "workflow.path applies.",
    )
    admin_api_key: str = setting(
        "",
        "API key for opening and closing sessions.",
        shown=ADMIN_KEY,
        no_effect="only the trainer opens and closes sessions, and it needs no key",
    )
    scheduling_spec: list[SchedulingSpec] = section(
        one_spec, "Resources of agents. The list must have exactly one entry, without cpu and env_vars."
    )
    mode: str = setting(
        "inline",
        "Run agents in the trainer process (inline), or in separate processes that areno can kill (subproc).",
        choices=("inline", "subproc", "online"),
        refused_values={
            "online": "external sessions (online) are not supported; set mode to inline or subproc, and agent_cls_path "
            "to your own agent"
        },
    )
    tool_call_parser: str = setting("qwen", "Parser of the model's tool calls.")
    reasoning_parser: str = setting("qwen3", "Parser that separates reasoning from the answer.")
    chat_template_type: str = setting(
        "hf",
        "Has no effect, because hf and concat do the same: a request reuses the recorded tokens of its conversation whenever "
        "possible.",
        choices=("hf", "concat"),
    )
    engine_max_tokens: int | None = setting(
        None,
        "Maximum number of tokens in prompt and completion together. If gconfig.max_tokens is smaller, "
        "gconfig.max_tokens applies.",
        minimum=1,
    )
    turn_discount: float = setting(
        1.0,
        "Discount factor per turn. A turn is credited with its own reward and the discounted rewards of later turns.",
        minimum=0,
        maximum=1,
    )
    export_style: str = setting(
        "individual",
        "Make one row per answer of the model (individual) or one row per conversation (concat). With concat, "
        "a conversation that forks gives one row per branch.",
        choices=("individual", "concat"),
    )
    subproc_max_workers: int = setting(4, "Maximum number of agent processes in mode subproc.", minimum=1)
    session_timeout_seconds: int = setting(
        3600, "Timeout in seconds of an agent's run and of each request during the run.", minimum=1
    )
    set_reward_finish_timeout: float = setting(
        0.0, "Seconds to wait for rewards after the agent has finished.", minimum=0
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        yield from worker_problems(self.scheduling_spec, (1,))
        for spec in self.scheduling_spec:
            because = "for agents, which use the CPU cores and environment variables of the trainer; remove the setting"
            yield from ineffective(spec, ("cpu", "env_vars"), because, "scheduling_spec.0.")
        if self.mode != "subproc":
            yield from ineffective(
                self, ("subproc_max_workers",), "because mode is not subproc; set mode to subproc too"
            )


@dataclass
class InferenceEngineConfig:
    """Settings of the rollout: the inference engine, staleness and agents."""

    experiment_name: str | None = setting(
        None, "Experiment name. Set the top-level setting `experiment_name` instead.", inherits="experiment_name"
    )
    trial_name: str | None = setting(
        None, "Trial name. Set the top-level setting `trial_name` instead.", inherits="trial_name"
    )
    fileroot: str | None = setting(
        None, "Root folder of the run. Set `cluster.fileroot` instead.", inherits="cluster.fileroot"
    )
    max_concurrent_rollouts: int | None = setting(
        None,
        "Maximum number of prompts whose answers are generated concurrently.",
        minimum=1,
        inherits="rollout.consumer_batch_size",
        shown="rollout.consumer_batch_size",
    )
    queue_size: int | None = setting(
        None,
        "Maximum number of prompts that wait for generation. If null: 16 x max_concurrent_rollouts. In any case "
        "at most (max_head_offpolicyness + 1) x consumer_batch_size.",
        minimum=1,
    )
    consumer_batch_size: int = setting(
        0,
        "Number of prompts per training step.",
        minimum=1,
        inherits="train_dataset.batch_size",
        shown="train_dataset.batch_size",
    )
    max_head_offpolicyness: int = setting(
        0,
        "Maximum lead of generation over training, in batches. Beyond this lead, no new episodes start. "
        "With 0, training is synchronous.",
        minimum=0,
    )
    max_staleness: int | None = setting(
        None,
        "Maximum staleness of trained tokens, in weight versions. If null, there is no maximum. The setting on_stale selects "
        "the action for staler trajectories.",
        minimum=0,
    )
    on_stale: str = setting(
        "drop",
        "Whether to drop a trajectory that exceeds max_staleness or to regenerate the trajectory from its prompt.",
        choices=("drop", "regenerate"),
    )
    enable_rollout_tracing: bool = setting(
        False, "For each generation request, log the prompt length, the answer lengths and the duration."
    )
    check_trajectory_format: bool = setting(
        False, "Check the keys and shapes of the trajectories that a workflow returns."
    )
    tokenizer_path: str = setting(
        "",
        "Path of the tokenizer that decodes trajectories for dump_to_file. The path must equal actor.path, because areno "
        "uses only the tokenizer in the model's folder.",
        inherits="tokenizer_path",
        shown="tokenizer_path",
    )
    dump_to_file: bool = setting(False, "Write every trajectory as text to the run directory.")
    save_rollouts: str | None = setting(
        None,
        "Number of newest steps whose training rows are kept in rollouts/ of the run directory, for the command "
        "`areno replay`. `all` keeps the rows of every step; null or 0 saves no rows.",
    )
    setup_timeout: float = setting(300.0, "Seconds that an engine may take to load.", above=0)
    workers_ready_timeout: float = start_timeout(
        30.0, "Seconds that a worker process may take to respond after its start.", above=0
    )
    request_timeout: float = setting(3600.0, "Timeout in seconds of each attempt at a generation request.", above=0)
    request_retries: int = setting(3, "Maximum number of retries of a failed request.", minimum=0)
    pause_grace_period: float = setting(
        0.0,
        "Seconds to wait between pausing generation and updating the weights.",
        minimum=0,
        no_effect="a weight update pauses generation between two tokens without dropping requests, so no wait is needed",
    )
    scheduling_spec: list[SchedulingSpec] = section(
        one_spec,
        "Resources of a rollout worker. A second list entry has no effect.",
    )
    backend: str = setting(
        "",
        "Engine, number of replicas (d) and tensor-parallel size (t), such as areno:d2 (two replicas of the built-in engine) "
        "or vllm:d2t2 (two vLLM servers with two devices each).",
        required=True,
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Whether the rollout has its own devices.")
    use_lora: bool = setting(
        False, "Serve the actor's adapter instead of full weights.", inherits="actor.use_lora", shown="actor.use_lora"
    )
    lora_name: str = setting(
        "", "Name under which the adapter is served.", inherits="gconfig.lora_name", shown="gconfig.lora_name"
    )
    agent: AgentConfig = section(AgentConfig, "How agents run, and how their conversations become training rows.")
    speculate: int = setting(
        0,
        "Maximum number of draft tokens per decode step for speculative decoding by prompt lookup (CPU only). "
        "Speculation does not change the answers. 0 disables speculation.",
        minimum=0,
        maximum=63,
    )
    return_routed_experts: bool = setting(
        False,
        "Routing replay: train each token with the experts that the rollout chose for the token. Otherwise, training "
        "may choose other experts. On a CPU, this option disables compiled decode steps.",
    )
    _version: str = setting(
        "v1",
        "Whether the run generates in its own workers (v1) or in services behind a gateway (v2).",
        choices=("v1", "v2"),
        refused=NO_GATEWAY,
    )
    model: str = of_gateway("default", "Model name that a gateway reports.")
    routing_strategy: str = of_gateway("round_robin", "Strategy by which a gateway routes requests.")
    poll_interval: float = of_gateway(
        5.0, "Seconds between two health checks that a gateway's router performs.", above=0
    )
    admin_api_key: str = of_gateway("", "API key of the gateway services.", shown=ADMIN_KEY)
    api_url: str | None = setting(
        None,
        "Comma-separated addresses of running vLLM or SGLang servers, one per replica. If null, areno starts "
        "the servers.",
    )
    provider_api_key: str | None = setting(None, "API key of the servers at api_url.")

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        yield from worker_problems(self.scheduling_spec, (1, 2))
        if self.max_staleness is None:
            yield from ineffective(self, ("on_stale",), "without max_staleness; set max_staleness too")
        try:
            kept_rollouts(self.save_rollouts)
        except UsageError as error:
            yield "save_rollouts", str(error)
