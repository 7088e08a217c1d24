"""The model: one ``transformers`` module for rollout and training. Rollout and training use different attention plans.

- ``loading``: loads a checkpoint as a policy, critic or reward model; ``load_check``: validates the loaded model.
- ``packed_model``: base class of these models.
- ``causal_lm``: the policy; ``value_model``: critics and reward models.
- ``attention``: the attention function registered with ``transformers``; ``varlen``: attention kernels on GPUs.
- ``packing``: the attention plan of training and prefill; ``tree``: a plan that computes common prefixes once.
- ``recurrent``: linear-attention layers in packed calls; ``linear``: faster linear layers on CPUs.
- ``token_logprobs``: log-probs from logits; ``chunked_head``: the output head, without all logits in memory at once.
- ``adapter``: LoRA adapters; ``attach_adapter``: attaches and merges adapters; ``sharded_adapter``: LoRA with tensor
  parallelism.
- ``routing``: routing replay for MoE models; ``routers``: finds a model's routers.
- ``windows``: narrows attention windows, to detect layers that ignore them.
- ``stages``: models that hold only some of their layers, for pipeline parallelism.
"""
