"""The trainers of ``areno train``. Each trainer defines the steps of one kind of algorithm.

``RolloutTrainer.run_step`` in the module ``rollout_trainer`` runs a step of reinforcement learning in this order:

1. rollout: the module ``source`` (for completions and workflows) or ``agents`` returns a list of
   :class:`areno.api.records.Sample`
2. reward: :mod:`areno.rewards.runner`, a reward model or the workflow scores the samples
3. advantage: :mod:`areno.training.objectives.policy` computes the advantages, with settings from the module
   ``ppo`` (for PPO) or ``policy_only`` (for other algorithms)
4. update: :mod:`areno.engine.train.step` runs the optimizer steps
5. publish: if there are rollout processes, ``source`` sends them the new weights

The other modules:

- The module ``samples`` decides whether too many samples failed, and converts the trajectories of workflows to samples.
- The module ``supervised`` contains the trainers that do not generate: SFT, DPO and reward models.
- The module ``base`` contains the base class of all trainers, a subclass of :class:`areno.training.loop.TrainingLoop`.
- The module ``step_reporter`` writes log lines and metrics.
"""
