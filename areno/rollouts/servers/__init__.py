"""Rollout replicas that are vLLM or SGLang servers.

- ``replica``: a server with the interface of a replica; ``start``: starts or joins a server.
- ``command_line``: which servers to use, and the command that starts one.
- ``process``: the process of a server; ``run_supervised``: the program that runs the server's command.
- ``calls``: the HTTP calls that areno needs; ``vllm_client`` and ``sglang_client``: the calls of each product.
- ``channel``: broadcasts weights to vLLM servers; ``extension/``: areno's code in vLLM's workers, which receives the weights.
- ``scorer``: scores rows with a model on any OpenAI-compatible server.
"""
