"""Options of the groups Rollout and Parameter tuning: generating completions and scoring them."""

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

SERVERS = ("vllm", "sglang")
"""Products whose servers may generate; each has a section of its name in experiments."""

_rollout = partial(option, group="Rollout", rollout_only=True)
_rollout_free = partial(_rollout, changes_results=False)
_shared = partial(option, group="Rollout")
_tuning = partial(option, group="Parameter tuning", rollout_only=True, changes_results=False, stored=False)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Batch volume, lengths, sampling, the decode runtime and the reward signal."""

    batch_size: int = _shared(32, minimum=1, help="Prompts (RL), rows (SFT) or pairs (DPO) of one step.")
    n_samples: int = _rollout(8, minimum=1, help="Completions per prompt; their rewards are compared with each other.")
    max_running_prompts: int | None = _rollout_free(
        None, minimum=1, unset="batch-size x n-samples", help="Most sequences that are generated at the same time."
    )
    max_prompt_tokens: int = _shared(1024, minimum=1, help="Longer prompts are skipped and counted, never cut.")
    max_new_tokens: int = _shared(3071, minimum=1, help="Most tokens of a generated or supervised response.")
    max_context_len: int | None = _shared(
        None,
        minimum=2,
        unset="the model's limit",
        help="Most tokens of a row: prompt and response, or an agent's whole conversation. The model's own limit also holds.",
    )
    temperature: float = _rollout(
        1.0,
        above=0,
        remedy="for the most likely token use --greedy",
        help="Sampling temperature; log-probs are those of the scaled policy.",
    )
    top_k: int = _rollout(-1, minimum=-1, help="Sample among the k most likely tokens; -1 for all.")
    top_p: float = _rollout(1.0, above=0, maximum=1, help="Sample among the most likely tokens that hold this mass.")
    greedy: bool = _rollout(False, help="Always take the most likely token.")
    stop: tuple[str, ...] = _rollout(
        (), help="End a completion when this text appears, also across token borders. Repeatable."
    )
    stop_token_ids: tuple[int, ...] = _rollout(
        (), minimum=0, help="End a completion at these token ids, besides EOS. Repeatable, or separated by commas."
    )
    ignore_eos: bool = _rollout(False, help="Generate on past EOS, up to --max-new-tokens.")
    kv_cache_tokens: int | None = _rollout_free(
        None, minimum=1, unset="from free memory", help="Budget of the KV cache in tokens, over all running sequences."
    )
    eager_decode: bool = _rollout_free(False, help="Never compile the decode step, nor capture it as CUDA graphs.")
    speculate: int = _rollout_free(
        0,
        minimum=0,
        maximum=63,
        help="Tokens to guess ahead by prompt lookup; answers stay the same. Pays for large models and few sequences.",
    )
    return_routed_experts: bool = _rollout(
        False,
        help="Record which experts each token was routed to, and route it there in training too: a mixture of experts then has "
        "no gap from routing. Decoding is eager.",
    )
    drop_rollout_state: bool = _rollout_free(
        False, help="Free the KV cache after each rollout, for less memory and a slower start."
    )
    attn_backend: str = _shared(
        "flash",
        choices=("flash", "native"),
        help="Attention kernels: flash where the device has them, else and with native those of PyTorch.",
    )
    disable_thinking: bool = _shared(False, help="Pass enable_thinking=False to chat templates that know the switch.")
    rollout: str = _rollout(
        "sync",
        choices=("sync", "async"),
        help="Generate in turn with training (sync), or beside it in processes of its own (async).",
    )
    rollout_replicas: int = _rollout_free(
        1, minimum=1, help="Asynchronous rollout: processes that generate, each of --tp-size ranks."
    )
    rollout_backend: str = _rollout(
        "areno",
        choices=("areno", *SERVERS),
        help="What generates: areno's own engine, or inference servers of vLLM or SGLang, one for each --rollout-replicas; "
        "without --rollout async in turn with training.",
    )
    rollout_url: tuple[str, ...] = _rollout_free(
        (),
        metavar="URL",
        help="Servers: join one that runs at this address, in place of starting it. Repeatable, one per replica.",
    )
    rollout_server_command: str | None = _rollout_free(
        None,
        metavar="COMMAND",
        unset="that of this environment",
        help="Servers: what starts one, such as /PATH/bin/vllm serve.",
    )
    rollout_server_args: str | None = _rollout_free(
        None, metavar="ARGUMENTS", help="Servers: further arguments of the command, in one pair of quotes."
    )
    max_staleness: int = _rollout(
        1,
        minimum=0,
        help="Asynchronous rollout: most updates that the weights behind a token may lack when it is trained on.",
    )
    workflow: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY:NAME",
        help="Workflow that does the prompts' tasks and rewards them: a class or object with arun_episode(engine, data), or an "
        "agent with run(data).",
    )
    agent_fn: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Agentic rollout: Python function that does the tasks; run_agent(ctx, batch) unless named.",
    )
    agent_timeout_s: float = _rollout_free(
        300.0, above=0, help="Agentic rollout: deadline of each call of the agent and of each of its requests."
    )
    agent_retries: int = _rollout_free(
        1, minimum=0, help="Agentic rollout: how often a sample that the agent did not finish is run again, alone."
    )
    agent_max_failures: float = _rollout_free(
        0.5,
        minimum=0,
        maximum=1,
        help="Agentic rollout: stop when more than this share of a step's samples fails for good (of its prompts, with "
        "--workflow); fewer are dropped.",
    )
    train_tool_results: bool = _rollout(
        False, help="Agentic rollout: also train on the tokens that tools returned to the agent."
    )
    turn_discount: float | None = _shared(
        None,
        minimum=0,
        maximum=1,
        algorithms=("gspo", "grpo"),
        unset="the reward counts for all turns alike",
        help="Agentic rollout: each turn learns from its own reward and, discounted by this per turn, those that follow.",
    )
    reward_fn_path: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that scores one completion; reward_fn(record) unless named.",
    )
    reward_weights: str | None = _rollout(
        None,
        metavar="NAME=WEIGHT,...",
        unset="every part counts as it is",
        help="Weights of the named parts that the reward function returns, such as format=0.2,answer=1; 1 where not named.",
    )
    reward_normalize_parts: bool = _rollout(
        False, help="Standardise each part of the reward among a prompt's samples, then weight it (GDPO)."
    )
    reward_ckpt: str | None = _rollout(
        None,
        path="place",
        help="Reward model in place of a function: a sequence classifier in Hugging Face format, or a repo id.",
    )
    reward_timeout_s: float = _rollout_free(
        60.0, above=0, help="Seconds that one call of the reward function may take."
    )
    reward_workers: int | None = _rollout_free(
        None, minimum=1, unset="by CPU count", help="Processes that run the reward function."
    )
    reward_memory_gb: float | None = _rollout_free(
        None,
        above=0,
        unset="no limit",
        help="GiB of data that each process of a reward file may have; beyond it, its record fails.",
    )
    on_reward_error: str = _rollout_free(
        "stop", choices=("stop", "drop"), help="When a reward fails: stop the run, or drop that sample and count it."
    )


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """The search for batch sizes that fit the memory."""

    tune_params: bool = _tuning(
        False,
        help="Probe memory before the first step, and fill in --max-running-prompts, --batch-size and --mini-bs, as far as "
        "they are not given. Also sets --drop-rollout-state.",
    )
    mem_frac: float = _tuning(
        0.9, above=0, maximum=1, help="Share of the memory, what is in use counted, that tuning may fill."
    )
    tune_max_samples: int = _tuning(
        256, minimum=1, help="Most sequences that tuning lets run at once, and most rows of a step that it chooses."
    )
