"""Optimizer steps: update the weights from rows of tokens, and compute statistics.

- ``step``: runs optimizer steps on rows; ``microbatch``: divides rows into microbatches.
- ``batch``: packs rows into a microbatch; ``outputs``: what policies, critics and reward models compute for a loss.
- ``optimizer``: AdamW, and the interface of optimizers; ``sharded``: AdamW with states sharded across replicas;
  ``fsdp``: AdamW under FSDP.
- ``adam_8bit`` and ``adam_bf16``: moments in 8 bits or bf16; ``state_files``: optimizer state on disk.
- ``schedule``: learning rate; ``loss_scale``: scaling of the loss in fp16.
- ``token_records``: per-token log-probs and clip flags of recorded samples.
- ``recompute``: activation checkpointing; ``replay``: routing replay for MoE models.
"""
