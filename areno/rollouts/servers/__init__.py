"""Rollout replicas that are external inference servers, vLLM and SGLang.

- ``replica``: a server with the interface of a replica; ``start``: starts it, or joins a running one.
- ``command_line``: which servers to use, and the command that starts one.
- ``process``: the process of a server; ``run_supervised``: the program that runs the server's command in it.
- ``calls``: the HTTP calls that areno needs; ``vllm_client`` and ``sglang_client``: these calls of each product.
- ``channel``: broadcasts weights to vLLM servers; ``extension/``: areno's code in vLLM's workers, which receives them.
- ``scorer``: scores rows with a model on any OpenAI-compatible server.
"""
