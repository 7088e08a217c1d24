"""Command lines of vLLM and SGLang: each setting of their sections changes them as the servers' documentation says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from areno.config.experiment.backend_sections import SGLangConfig, vLLMConfig
from areno.config.experiment.server_arguments import server_arguments, sglang_arguments, vllm_arguments
from areno.errors import UsageError

# Setting, value, and what it adds to the command line.
VLLM = {
    "seed": (7, "--seed 7"),
    "skip_tokenizer_init": (True, "--skip-tokenizer-init"),
    "enforce_eager": (True, "--enforce-eager"),
    "dtype": ("float16", "--dtype float16"),
    "distributed_executor_backend": ("ray", "--distributed-executor-backend ray"),
    "max_num_seqs": (9, "--max-num-seqs 9"),
    "block_size": (32, "--block-size 32"),
    "cpu_offload_gb": (1.5, "--cpu-offload-gb 1.5"),
    "disable_sliding_window": (True, "--disable-sliding-window"),
    "max_model_len": (512, "--max-model-len 512"),
    "no_enable_chunked_prefill": (True, "--no-enable-chunked-prefill"),
    "no_enable_prefix_caching": (True, "--no-enable-prefix-caching"),
    "gpu_memory_utilization": (0.5, "--gpu-memory-utilization 0.5"),
    "worker_extension_cls": ("a.B", "--worker-extension-cls a.B"),
    "enable_sleep_mode": (True, "--enable-sleep-mode"),
    "uvicorn_log_level": ("debug", "--uvicorn-log-level debug"),
    "gdn_prefill_backend": ("triton", "--gdn-prefill-backend triton"),
    "enable_lora": (True, "--enable-lora --max-lora-rank 16 --max-loras 8"),
    "max_lora_rank": (17, "--max-lora-rank 32"),  # rounded up to a rank that vLLM accepts
    "max_loras": (3, "--max-loras 3"),
    "lora_modules": (["a=x", "b=y"], "--lora-modules a=x b=y"),
}
SGLANG = {
    "random_seed": (7, "--random-seed 7"),
    "skip_tokenizer_init": (True, "--skip-tokenizer-init"),
    "disable_cuda_graph": (True, "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"),
    "disable_radix_cache": (True, "--disable-radix-cache"),
    "enable_dp_attention": (True, "--attn-dp-size 1"),
    "cuda_graph_max_bs": (8, "--cuda-graph-max-bs-decode 8"),
    "cuda_graph_bs": ([1, 2], "--cuda-graph-bs-decode 1 2"),
    "attention_backend": ("triton", "--attention-backend triton"),
    "context_length": (512, "--context-length 512"),
    "chunked_prefill_size": (64, "--chunked-prefill-size 64"),
    "enable_multithread_load": (True, '--model-loader-extra-config {"enable_multithread_load": true}'),
    "enable_lora": (True, "--enable-lora --max-loaded-loras 8 --lora-backend triton"),
    "max_lora_rank": (8, "--max-lora-rank 8"),
    "max_loaded_loras": (2, "--max-loaded-loras 2"),
    "lora_paths": (["a=x"], "--lora-paths a=x"),
    "lora_backend": ("csgmv", "--lora-backend csgmv"),
    "dtype": ("half", "--dtype half"),
}
GONE = {"enable_ep_moe": True, "torchao_config": "int8wo", "enable_nan_detection": True}
LORA = {"max_lora_rank", "max_loras", "lora_modules", "max_loaded_loras", "lora_paths", "lora_backend"}
OTHERS = {bool: (True, ""), int: (77, "77"), float: (0.25, "0.25"), str: ("word", "word")}


def vllm(**changes) -> str:
    return " ".join(vllm_arguments(replace(vLLMConfig(), **changes), dtype="float32", context_length=4096, gpu=True))


def sglang(**changes) -> str:
    return " ".join(sglang_arguments(replace(SGLangConfig(), **changes), dtype="float32", context_length=4096))


@pytest.mark.parametrize("name", [entry.name for entry in fields(vLLMConfig) if entry.name not in ("model", "command")])
def test_each_setting_of_vllm_is_an_option(name):
    value, expected = VLLM[name]
    lora = {"enable_lora": True} if name in LORA else {}
    assert expected in vllm(**lora, **{name: value})
    if isinstance(value, bool):
        assert expected.split()[0] not in vllm(**{name: False}).split()
    else:
        assert expected not in vllm(**lora)


@pytest.mark.parametrize(
    "name", [e.name for e in fields(SGLangConfig) if e.name not in ("model_path", "command", *GONE)]
)
def test_each_setting_of_sglang_is_an_option(name):
    kind = type(getattr(SGLangConfig(), name))
    value, text = SGLANG.get(name) or OTHERS[str if kind is type(None) else kind]
    expected = text if name in SGLANG else f"--{name.replace('_', '-')} {text}".rstrip()
    lora = {"enable_lora": True} if name in LORA else {}
    assert expected in sglang(**lora, **{name: value})
    if isinstance(value, bool):
        assert expected.split()[0] not in sglang(**{name: False}).split()


@pytest.mark.parametrize(("name", "value"), GONE.items())
def test_an_option_that_sglang_has_dropped_is_refused_with_a_remedy(name, value):
    with pytest.raises(UsageError, match=rf"sglang\.{name}.*(instead|remove it)"):
        sglang(**{name: value})


def test_defaults_fit_the_model_and_the_machine():
    assert "--dtype float32" in vllm()
    assert "--max-model-len 4096" in vllm()  # not 32768, with which vLLM would not start
    assert "--block-size" not in vllm()
    assert "--attention-backend" not in sglang()
    assert "--context-length 4096" in sglang()
    on_cpu = vllm_arguments(vLLMConfig(), dtype="float32", context_length=None, gpu=False)
    assert "--gpu-memory-utilization" not in on_cpu
    assert "--no-enable-chunked-prefill" in on_cpu  # there, vLLM crashes on chunked prefills of requests with seeds
    with pytest.raises(UsageError, match="enable_sleep_mode"):
        vllm_arguments(vLLMConfig(enable_sleep_mode=True), dtype="float32", context_length=None, gpu=False)
    with pytest.raises(UsageError, match="max_lora_rank=513"):
        vllm(enable_lora=True, max_lora_rank=513)


@pytest.mark.parametrize(
    ("section", "rank", "expected"),
    [
        (SGLangConfig(), 32, {"--max-lora-rank": "32", "--lora-target-modules": "all", "--max-loaded-loras": "8"}),
        (
            SGLangConfig(enable_lora=True, max_lora_rank=64),
            32,
            {"--max-lora-rank": "64", "--lora-target-modules": "all"},
        ),
        (vLLMConfig(), 24, {"--max-lora-rank": "32", "--max-loras": "8"}),
    ],
)
def test_a_server_accepts_the_adapter_that_the_actor_trains(section, rank, expected):
    words = server_arguments(section, dtype="float32", context_length=None, gpu=True, adapter_rank=rank)
    assert "--enable-lora" in words
    assert {name: words[words.index(name) + 1] for name in expected} == expected


@pytest.mark.parametrize("section", [SGLangConfig(), vLLMConfig()])
def test_a_server_without_adapters_does_not_enable_lora(section):
    words = server_arguments(section, dtype="float32", context_length=None, gpu=True)
    assert not [word for word in words if "lora" in word]
