"""The trainers of ``areno train``. Each trainer defines the steps of one kind of algorithm.

``RolloutTrainer.run_step`` in ``rollout_trainer`` runs a step of reinforcement learning in this order:

1. rollout: ``source`` (completions and workflows) or ``agents``; the result is a list of :class:`areno.api.records.Sample`
2. reward: :mod:`areno.rewards.runner`, a reward model, or the workflow itself
3. advantage: :mod:`areno.training.objectives.policy`, with the settings of ``policy_only`` (GSPO, GRPO) or ``ppo``
4. update: optimizer steps of the same objective, by :mod:`areno.engine.train.step`
5. publish: ``source`` sends the new weights to the rollout processes, if any

- ``samples``: failed samples, samples of workflows, and the training rows of each sample.
- ``supervised``: steps without generation: SFT, DPO and reward models.
- ``base``: base of all trainers, a :class:`areno.training.loop.TrainingLoop`; ``step_reporter``: reports steps.
"""
