"""Rollout replicas that are vLLM or SGLang servers.

- ``replica``: lets areno use an inference server as a rollout replica; ``start``: starts a server or joins a running server.
- ``command_line``: options of the servers, and the command that starts a server.
- ``process``: the process of a server; ``run_supervised``: the program that runs the server's command.
- ``calls``: the interface of the HTTP calls; ``vllm_client`` and ``sglang_client``: the HTTP calls to each kind of server.
- ``channel``: broadcasts weights to vLLM servers; ``extension/``: areno's code in vLLM's workers, which receives the weights.
- ``scorer``: scores rows with a model on any OpenAI-compatible server.
"""
