"""The model: rollout and training share one ``transformers`` module.

Each forward pass takes an attention plan, which determines which tokens attend to each other.

- ``loading``: loads a checkpoint as a policy, critic or reward model; ``load_check``: validates the loaded model.
- ``packed_model``: base class of policies, critics and reward models.
- ``causal_lm``: the policy; ``value_model``: critics and reward models.
- ``attention``: the attention function registered with ``transformers``; ``varlen``: attention kernels on GPUs.
- ``packing``: the attention plan of training and prefill; ``tree``: an attention plan that computes common prefixes once.
- ``recurrent``: runs linear-attention layers over packed sequences; ``linear``: faster linear layers for CPUs.
- ``token_logprobs``: computes log-probs from logits; ``chunked_head``: computes the output head in chunks, to save memory.
- ``adapter``: LoRA adapters; ``attach_adapter``: attaches and merges adapters; ``sharded_adapter``: LoRA with tensor
  parallelism.
- ``routing``: routing replay for MoE models; ``routers``: finds a model's routers.
- ``windows``: narrows attention windows, to detect layers that ignore their attention window.
- ``stages``: models that hold only the layers of one pipeline stage.
"""
