"""Options in the help sections Rollout and Parameter tuning."""

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

SERVERS = ("vllm", "sglang")
"""Supported inference servers. In an experiment file (``areno run``), each server has a section with the name of the server."""

_rollout = partial(option, group="Rollout", rollout_only=True)
_rollout_free = partial(_rollout, changes_results=False)
_shared = partial(option, group="Rollout")
_tuning = partial(option, group="Parameter tuning", rollout_only=True, changes_results=False, stored=False)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Batch sizes, lengths, sampling, the decode runtime and rewards."""

    batch_size: int = _shared(32, minimum=1, help="Number of prompts (RL), rows (SFT) or pairs (DPO) per step.")
    n_samples: int = _rollout(8, minimum=1, help="Completions per prompt (the group size).")
    max_running_prompts: int | None = _rollout_free(
        None,
        minimum=1,
        unset="batch-size x n-samples",
        help="Maximum number of sequences that are generated concurrently.",
    )
    max_prompt_tokens: int = _shared(
        1024,
        minimum=1,
        help="Maximum number of tokens in a prompt. areno skips and counts longer prompts. For preference pairs, "
        "--max-prompt-tokens plus --max-new-tokens limits prompt and answer together.",
    )
    max_new_tokens: int = _shared(
        3071, minimum=1, help="Maximum number of tokens in a generated or supervised response."
    )
    max_context_len: int | None = _shared(
        None,
        minimum=2,
        unset="the model's limit",
        help="Maximum length of a row in tokens. A row is a prompt with its response, or the whole conversation of an "
        "agent. The model's limit also applies.",
    )
    temperature: float = _rollout(
        1.0,
        above=0,
        remedy="for greedy decoding use --greedy",
        help="Sampling temperature. Log-probs are computed from the temperature-scaled distribution.",
    )
    top_k: int = _rollout(
        -1, minimum=-1, help="Number of most likely tokens to sample from. -1 samples from all tokens."
    )
    top_p: float = _rollout(
        1.0,
        above=0,
        maximum=1,
        help="Nucleus sampling: sample from the smallest set of most likely tokens that reaches this total "
        "probability.",
    )
    greedy: bool = _rollout(False, help="Always take the most likely token.")
    stop: tuple[str, ...] = _rollout(
        (), help="End a completion when this text appears, even across token boundaries. Repeatable."
    )
    stop_token_ids: tuple[int, ...] = _rollout(
        (), minimum=0, help="End a completion at these token ids, in addition to EOS. Repeatable or comma-separated."
    )
    ignore_eos: bool = _rollout(False, help="Continue generating after EOS, up to --max-new-tokens.")
    kv_cache_tokens: int | None = _rollout_free(
        None,
        minimum=1,
        unset="from free memory",
        help="Size of each replica's KV cache, in tokens. All running sequences of a replica share the cache.",
    )
    eager_decode: bool = _rollout_free(False, help="Run decode steps eagerly, without torch.compile or CUDA graphs.")
    speculate: int = _rollout_free(
        0,
        minimum=0,
        maximum=63,
        help="Maximum number of draft tokens per decode step for speculative decoding by prompt lookup (CPU only). "
        "Speculation does not change the answers, and is faster for large models with few running sequences.",
    )
    return_routed_experts: bool = _rollout(
        False,
        help="Routing replay: record the experts that the rollout chooses for each token, and use the same experts in "
        "training. Without this option, training may choose other experts, which changes the log-probs. On a CPU, this "
        "option disables compiled decode steps.",
    )
    drop_rollout_state: bool = _rollout_free(
        False,
        help="Free the KV cache after each rollout. This option saves memory but slows the start of the next rollout.",
    )
    attn_backend: str = _shared(
        "flash",
        choices=("flash", "native"),
        help="Attention kernels. With `flash`, areno uses FlashAttention if the device supports it, and otherwise PyTorch's "
        "kernels. With `native`, areno always uses PyTorch's kernels.",
    )
    disable_thinking: bool = _shared(False, help="Pass enable_thinking=False to chat templates that support it.")
    rollout: str = _rollout(
        "sync",
        choices=("sync", "async"),
        help="Alternate generation and training (sync), or generate in separate processes during training (async).",
    )
    rollout_replicas: int = _rollout_free(
        1,
        minimum=1,
        help="Number of rollout replicas with --rollout async, or of servers with --rollout-backend vllm or sglang. "
        "Each replica or server has --tp-size ranks.",
    )
    rollout_backend: str = _rollout(
        "areno",
        choices=("areno", *SERVERS),
        help="Inference engine: areno's own engine, vLLM servers or SGLang servers. --rollout-replicas sets the "
        "number of servers. Unless --rollout async is set, generation and training take turns.",
    )
    rollout_url: tuple[str, ...] = _rollout_free(
        (),
        metavar="URL",
        help="Address of a running inference server to use. Repeatable, with one address per replica.",
    )
    rollout_server_command: str | None = _rollout_free(
        None,
        metavar="COMMAND",
        unset="the server installed in this environment",
        help="Command that starts an inference server, such as /PATH/bin/vllm serve.",
    )
    rollout_server_args: str | None = _rollout_free(
        None,
        metavar="ARGUMENTS",
        help="Additional command-line arguments of the inference servers, as one quoted string.",
    )
    max_staleness: int = _rollout(
        1,
        minimum=0,
        help="Maximum staleness of a token in asynchronous rollout. Staleness is the number of updates between the "
        "weights that sampled the token and the weights being trained.",
    )
    workflow: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY:NAME",
        help="Workflow that runs and rewards an episode for each prompt. A workflow is a class or object with "
        "arun_episode(engine, data), or an agent with run(data).",
    )
    agent_fn: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that runs the agent in agentic rollout. By default, areno calls the file's "
        "function run_agent(ctx, batch).",
    )
    agent_timeout_s: float = _rollout_free(
        300.0,
        above=0,
        help="Agentic rollout: timeout in seconds of each agent call, and of each request from the agent to the model.",
    )
    agent_retries: int = _rollout_free(
        1,
        minimum=0,
        help="Agentic rollout: number of retries of a sample that the agent did not finish. Each retry runs only "
        "this sample.",
    )
    agent_max_failures: float = _rollout_free(
        0.5,
        minimum=0,
        maximum=1,
        help="Agentic rollout: maximum fraction of a step's samples that may fail after all retries. Within this "
        "limit, the run drops the failed samples. The run stops if more samples fail, or if all samples fail. With --workflow, "
        "the limit is a fraction of the prompts instead.",
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
        help="Agentic rollout: discount factor per turn. Each turn is credited with its own reward and the "
        "discounted rewards of later turns.",
    )
    reward_fn_path: str | None = _rollout(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that scores one completion. Without :FUNCTION, areno calls reward_fn(record) in FILE.PY.",
    )
    reward_weights: str | None = _rollout(
        None,
        metavar="NAME=WEIGHT,...",
        unset="every weight is 1",
        help="Weights of the reward parts that the reward function returns, such as format=0.2,answer=1. The "
        "default weight of a part is 1.",
    )
    reward_normalize_parts: bool = _rollout(
        False, help="Standardize each reward part over the samples of a prompt before weighting (GDPO)."
    )
    reward_ckpt: str | None = _rollout(
        None,
        path="place",
        help="Reward model to use instead of a reward function: a folder or repo id of a sequence classifier in Hugging Face "
        "format.",
    )
    reward_timeout_s: float = _rollout_free(
        60.0, above=0, help="Timeout in seconds of one call of the reward function."
    )
    reward_workers: int | None = _rollout_free(
        None,
        minimum=1,
        unset="depends on the CPU cores",
        help="Number of processes that run the reward function.",
    )
    reward_memory_gb: float | None = _rollout_free(
        None,
        above=0,
        unset="no limit",
        help="Memory limit in GiB of each process that runs the reward function. A reward call that exceeds "
        "the limit fails.",
    )
    on_reward_error: str = _rollout_free(
        "stop",
        choices=("stop", "drop"),
        help="Action if a reward cannot be computed: end the run (stop), or discard the sample and count the failure (drop).",
    )


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Tuning of batch sizes to the available memory."""

    tune_params: bool = _tuning(
        False,
        help="Before the first step, probe memory and choose --max-running-prompts, --batch-size and --mini-bs. "
        "Tuning keeps the values that you set. Tuning also sets --drop-rollout-state.",
    )
    mem_frac: float = _tuning(
        0.9,
        above=0,
        maximum=1,
        help="The tuned run may use this fraction of the GPU memory (on a CPU: of the host memory) that other processes leave "
        "free.",
    )
    tune_max_samples: int = _tuning(
        256,
        minimum=1,
        help="Tuning chooses at most this value for --max-running-prompts, and for the product of --batch-size and "
        "--n-samples.",
    )
