"""Optimizer steps: rows of tokens in, new weights and statistics out.

- ``step``: a training call, from rows to optimizer steps; ``microbatch``: which rows share a pass.
- ``batch``: rows as one packed microbatch; ``outputs``: what a loss receives from policies, critics and reward models.
- ``optimizer``: AdamW, and the interface of optimizers; ``sharded``: states sharded across replicas; ``fsdp``: under FSDP.
- ``adam_8bit`` and ``adam_bf16``: moments in 8 bits or bf16; ``state_files``: optimizer state on disk.
- ``schedule``: learning rate; ``loss_scale``: scaling of the loss in fp16.
- ``token_records``: log-probs and clipping of single rows, for recorded samples.
- ``recompute``: activation checkpointing; ``replay``: routing replay for MoE models.
"""
