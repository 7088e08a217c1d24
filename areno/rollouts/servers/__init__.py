"""Rollout replicas that are vLLM or SGLang servers.

- ``replica``: a server with the interface of a replica; ``start``: starts or joins a server.
- ``command_line``: options of the servers, and the command that starts a server.
- ``process``: the process of a server; ``run_supervised``: the program that runs the server's command.
- ``calls``: the interface of the HTTP calls; ``vllm_client`` and ``sglang_client``: the HTTP calls of each product.
- ``channel``: broadcasts weights to vLLM servers; ``extension/``: areno's code in vLLM's workers, which receives the weights.
- ``scorer``: scores rows with a model on any OpenAI-compatible server.
"""
