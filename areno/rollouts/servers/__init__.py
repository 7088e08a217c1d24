"""Rollout replicas that are external inference servers, vLLM and SGLang: their processes and HTTP calls."""
