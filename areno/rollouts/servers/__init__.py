"""Rollout replicas that are inference servers of others, vLLM and SGLang: their processes, and their calls over HTTP."""
