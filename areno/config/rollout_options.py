"""Options of the groups Rollout and Parameter tuning: how completions are generated and scored."""

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

SERVERS = ("vllm", "sglang")
"""Supported inference servers; each has a section with its name in experiments."""

_rollout = partial(option, group="Rollout", rollout_only=True)
_rollout_free = partial(_rollout, changes_results=False)
_shared = partial(option, group="Rollout")
_tuning = partial(option, group="Parameter tuning", rollout_only=True, changes_results=False, stored=False)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Batch sizes, lengths, sampling, the decode runtime and rewards."""

    batch_size: int = _shared(32, minimum=1, help="Prompts (RL), rows (SFT) or pairs (DPO) per step.")
    n_samples: int = _rollout(8, minimum=1, help="Completions per prompt (the group size).")
    max_running_prompts: int | None = _rollout_free(
        None, minimum=1, unset="batch-size x n-samples", help="Maximum number of sequences generated concurrently."
    )
    max_prompt_tokens: int = _shared(
        1024,
        minimum=1,
        help="Maximum tokens of a prompt; longer prompts are skipped and counted, never truncated. For preference "
        "pairs, max-prompt-tokens + max-new-tokens limits prompt and answer together.",
    )
    max_new_tokens: int = _shared(3071, minimum=1, help="Maximum tokens of a generated or supervised response.")
    max_context_len: int | None = _shared(
        None,
        minimum=2,
        unset="the model's limit",
        help="Maximum tokens of a row: prompt and response, or an agent's whole conversation. The model's limit also applies.",
    )
    temperature: float = _rollout(
        1.0,
        above=0,
        remedy="for greedy decoding use --greedy",
        help="Sampling temperature; log-probs are computed from the scaled distribution.",
    )
    top_k: int = _rollout(-1, minimum=-1, help="Sample from the k most likely tokens; -1 for all tokens.")
    top_p: float = _rollout(
        1.0,
        above=0,
        maximum=1,
        help="Nucleus sampling: sample from the most likely tokens with this total probability.",
    )
    greedy: bool = _rollout(False, help="Always take the most likely token.")
    stop: tuple[str, ...] = _rollout(
        (), help="End a completion when this text appears, even across token boundaries. Repeatable."
    )
    stop_token_ids: tuple[int, ...] = _rollout(
        (), minimum=0, help="End a completion at these token ids, in addition to EOS. Repeatable or comma-separated."
    )
    ignore_eos: bool = _rollout(False, help="Continue past EOS, up to --max-new-tokens.")
    kv_cache_tokens: int | None = _rollout_free(
        None,
        minimum=1,
        unset="from free memory",
        help="Size of each replica's KV cache in tokens, shared by its running sequences.",
    )
    eager_decode: bool = _rollout_free(False, help="Run decode steps eagerly, without torch.compile or CUDA graphs.")
    speculate: int = _rollout_free(
        0,
        minimum=0,
        maximum=63,
        help="Speculative decoding by prompt lookup (CPU only): maximum draft tokens per decode step; answers do not "
        "change. This is faster for large models and few sequences.",
    )
    return_routed_experts: bool = _rollout(
        False,
        help="Routing replay: record each token's experts in rollout and reuse them in training, so that routing differences "
        "do not change log-probs. On a CPU, this option disables compiled decode steps.",
    )
    drop_rollout_state: bool = _rollout_free(
        False, help="Free the KV cache after each rollout, which saves memory but slows the start of the next rollout."
    )
    attn_backend: str = _shared(
        "flash",
        choices=("flash", "native"),
        help="Attention kernels: flash uses FlashAttention if the device supports it and PyTorch's kernels otherwise; native "
        "always uses PyTorch's kernels.",
    )
    disable_thinking: bool = _shared(False, help="Pass enable_thinking=False to chat templates that support it.")
    rollout: str = _rollout(
        "sync",
        choices=("sync", "async"),
        help="Alternate generation and training (sync), or generate concurrently in separate processes (async).",
    )
    rollout_replicas: int = _rollout_free(
        1, minimum=1, help="Number of rollout replicas (with --rollout async) or servers, each with --tp-size ranks."
    )
    rollout_backend: str = _rollout(
        "areno",
        choices=("areno", *SERVERS),
        help="Inference engine: areno's own engine, or vLLM or SGLang servers. --rollout-replicas sets the number of servers. "
        "Servers alternate "
        "with training unless --rollout async is set.",
    )
    rollout_url: tuple[str, ...] = _rollout_free(
        (),
        metavar="URL",
        help="Servers: use the running server at this address instead of starting a server. Repeatable: one address per "
        "replica.",
    )
    rollout_server_command: str | None = _rollout_free(
        None,
        metavar="COMMAND",
        unset="the server installed in this environment",
        help="Servers: command that starts a server, such as /PATH/bin/vllm serve.",
    )
    rollout_server_args: str | None = _rollout_free(
        None,
        metavar="ARGUMENTS",
        help="Servers: additional arguments of the server's command line, as one quoted string.",
    )
    max_staleness: int = _rollout(
        1,
        minimum=0,
        help="Asynchronous rollout: maximum number of updates by which the weights that sampled a token may lag behind the "
        "weights being trained.",
    )
    workflow: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY:NAME",
        help="Workflow that runs and rewards an episode for each prompt: a class or object with arun_episode(engine, data), or "
        "an agent with run(data).",
    )
    agent_fn: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Agentic rollout: Python function that runs the agent; by default run_agent(ctx, batch) in the file.",
    )
    agent_timeout_s: float = _rollout_free(
        300.0, above=0, help="Agentic rollout: timeout of each agent call and of each of its requests, in seconds."
    )
    agent_retries: int = _rollout_free(
        1,
        minimum=0,
        help="Agentic rollout: number of retries of a sample that the agent did not finish; each retry runs only "
        "that sample.",
    )
    agent_max_failures: float = _rollout_free(
        0.5,
        minimum=0,
        maximum=1,
        help="Agentic rollout: stop the run if more than this fraction of a step's samples (with --workflow, prompts) fails "
        "after all retries, or if all fail; otherwise drop the failed samples.",
    )
    train_tool_results: bool = _rollout(
        False, help="Agentic rollout: also train on the tokens that tools returned to the agent."
    )
    turn_discount: float | None = _shared(
        None,
        minimum=0,
        maximum=1,
        algorithms=("gspo", "grpo"),
        unset="all turns get the same reward",
        help="Agentic rollout: credit each turn with its own reward and the rewards of later turns, discounted by this factor "
        "per turn.",
    )
    reward_fn_path: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that scores one completion; by default reward_fn(record) in the file.",
    )
    reward_weights: str | None = _rollout(
        None,
        metavar="NAME=WEIGHT,...",
        unset="every weight is 1",
        help="Weights of the reward parts that the reward function returns, such as format=0.2,answer=1; parts without "
        "a weight get 1.",
    )
    reward_normalize_parts: bool = _rollout(
        False, help="Standardize each part of the reward over the samples of a prompt before weighting (GDPO)."
    )
    reward_ckpt: str | None = _rollout(
        None,
        path="place",
        help="Reward model to use instead of a reward function: a folder or repo id of a sequence classifier in Hugging Face "
        "format.",
    )
    reward_timeout_s: float = _rollout_free(
        60.0, above=0, help="Timeout of one call of the reward function, in seconds."
    )
    reward_workers: int | None = _rollout_free(
        None, minimum=1, unset="by CPU count", help="Processes that run the reward function."
    )
    reward_memory_gb: float | None = _rollout_free(
        None,
        above=0,
        unset="no limit",
        help="Memory limit, in GiB, of each process that runs the reward function; a record that exceeds the limit fails.",
    )
    on_reward_error: str = _rollout_free(
        "stop",
        choices=("stop", "drop"),
        help="What to do if a reward fails: stop the run, or drop the sample and count the failure.",
    )


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Tuning of batch sizes to the available memory."""

    tune_params: bool = _tuning(
        False,
        help="Before the first step, probe memory and choose values for those of --max-running-prompts, --batch-size and "
        "--mini-bs that are not set. Also sets --drop-rollout-state.",
    )
    mem_frac: float = _tuning(
        0.9, above=0, maximum=1, help="Fraction of memory that the tuned run may fill, including memory already in use."
    )
    tune_max_samples: int = _tuning(
        256, minimum=1, help="Largest number of concurrent sequences, and of rows per step, that tuning may choose."
    )
