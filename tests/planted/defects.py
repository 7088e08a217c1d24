"""Plausible mistakes, one line each, and the tests that must catch them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defect:
    """A mistake: ``before``, a line or part of a line that occurs once in ``file``, becomes ``after``, and ``tests`` fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


DEFECTS = (
    Defect(
        "temperature dropped from log-probs",
        "areno/engine/model/token_logprobs.py",
        "return logits.float() / temperatures[:, None]",
        "return logits.float()",
        ("tests/engine/test_sampler.py::test_temperature_gives_the_exact_distribution",),
    ),
    Defect(
        "window of a tree one token too wide",
        "areno/engine/model/packing.py",
        "window_mask(before + length, window, like, before)",
        "window_mask(before + length, window and window + (before > 0), like, before)",
        ("tests/engine/test_tree_training.py::test_log_probs_and_gradients_on_a_tree_equal_the_flat_ones",),
    ),
    Defect(
        "first token of an answer is predicted from another answer",
        "areno/engine/train/batch.py",
        "places[actions[scored] - 1]",
        "places[actions[scored]] - 1",
        ("tests/engine/test_tree_training.py::test_every_algorithm_learns_from_trees_what_it_learns_from_rows",),
    ),
    Defect(
        "scaled positions of a GGUF file are plain",
        "areno/storage/gguf.py",
        "tensors[_ROPE].data if _ROPE in tensors else None",
        "None",
        ("tests/engine/test_gguf.py::test_scaled_positions_of_llama_3_and_biases_survive",),
    ),
    Defect(
        "a GGUF file has biases in another order than its weights",
        "areno/engine/checkpoint/gguf_export.py",
        'if arch == "llama" and ("q_proj" in name or "k_proj" in name):',
        'if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):',
        ("tests/engine/test_gguf.py::test_scaled_positions_of_llama_3_and_biases_survive",),
    ),
    Defect(
        "alpha of an adapter is its rank",
        "areno/engine/model/attach_adapter.py",
        "lora_alpha=2 * options.rank if options.alpha is None else options.alpha,",
        "lora_alpha=options.rank if options.alpha is None else options.alpha,",
        ("tests/engine/test_adapter.py::test_steps_equal_those_of_peft_with_adamw",),
    ),
    Defect(
        "prefixes of old weights are found",
        "areno/engine/rollout/prefix_store.py",
        "if version != self._version or not self._entries:",
        "if not self._entries:",
        ("tests/engine/test_rollout_schedule.py::test_prefixes_stored_under_other_weights_are_not_found",),
    ),
    Defect(
        "least length one token too long",
        "areno/engine/rollout/logit_edits.py",
        "if self._length < self._params.min_new_tokens:",
        "if self._length <= self._params.min_new_tokens:",
        ("tests/experiments/test_real_engine.py::test_stop_tokens_are_masked_before_the_minimum_length",),
    ),
    Defect(
        "admission forgets the new sequence",
        "areno/engine/rollout/scheduler.py",
        "if self.running and (len(self.running) + 1) * columns > self.budget_tokens:",
        "if self.running and len(self.running) * columns > self.budget_tokens:",
        ("tests/engine/test_scheduler.py",),
    ),
    Defect(
        "decay counts from the first step",
        "areno/engine/train/schedule.py",
        "progress = (step - self.warmup_steps) / max(",
        "progress = step / max(",
        (
            "tests/engine/test_train_step.py::test_linear_decay_after_warm_up",
            "tests/engine/test_train_step.py::test_cosine_decay_and_constant_rate",
        ),
    ),
    Defect(
        "gradients of microbatches replaced",
        "areno/engine/train/optimizer.py",
        "master.grad = gradient if master.grad is None else master.grad.add_(gradient)",
        "master.grad = gradient",
        ("tests/engine/test_train_step.py::test_bf16_gradients_of_microbatches_are_summed_in_fp32",),
    ),
    Defect(
        "checkpoint not flushed to the disk",
        "areno/storage/checkpoint_folder.py",
        "            sync_tree(partial)",
        "            pass",
        ("tests/engine/test_checkpoint_folder.py::test_everything_is_flushed_to_disk_before_a_checkpoint_is_renamed",),
    ),
    Defect(
        "pending normal draw forgotten",
        "areno/engine/checkpoint/rng.py",
        '"python": [version, list(internal), gauss],',
        '"python": [version, list(internal), None],',
        ("tests/engine/test_checkpoint_folder.py::test_random_state_comes_back",),
    ),
    Defect(
        "heaviest shares merged",
        "areno/engine/parallel/balance.py",
        "zip(left, reversed(right), strict=True)",
        "zip(left, right, strict=True)",
        ("tests/engine/parallel/test_balance.py",),
    ),
    Defect(
        "part of the first rank summed by all",
        "areno/engine/parallel/channels.py",
        "parts = [buffer[group.rank * count :][:count] for buffer in buffers]",
        "parts = [buffer[:count] for buffer in buffers]",
        ("tests/engine/parallel/test_shared_buffer.py::test_sums_match_float64",),
    ),
    Defect(
        "rows of a replica rounded down",
        "areno/engine/plan/sizes.py",
        "rows = -(-self.rows_of_step() // (together * self.layout.dp_size)) * together",
        "rows = self.rows_of_step() // (together * self.layout.dp_size) * together",
        ("tests/engine/test_plan_ranks.py::test_a_replica_gets_the_larger_share_of_an_odd_number_of_rows",),
    ),
    Defect(
        "adapter as its own reference counted twice",
        "areno/engine/plan/sizes.py",
        "own = run.uses_lora and ref == ckpt",
        "own = False",
        ("tests/engine/test_plan.py::test_roles_are_counted_where_a_run_holds_them",),
    ),
    Defect(
        "zero upper clip width taken for none",
        "areno/loss_fns/clipping.py",
        "self.eps if self.eps_high is None else self.eps_high)",
        "self.eps_high or self.eps)",
        ("tests/loss_fns/test_policy_loss.py",),
    ),
    Defect(
        "continuation always counted",
        "areno/loss_fns/gae.py",
        "following = values[actions[-1]] if bootstrap and actions else 0.0",
        "following = values[actions[-1]] if actions else 0.0",
        (
            "tests/e2e/test_ppo.py::test_a_truncated_one_token_response_earns_its_reward_and_its_bootstrapped_value_if_enabled",
        ),
    ),
    Defect(
        "lower bound of 0 taken for none",
        "areno/loss_fns/rejection.py",
        "lower = -torch.inf if sampling.lower is None else sampling.lower",
        "lower = sampling.lower or -torch.inf",
        ("tests/loss_fns/test_rejection.py",),
    ),
    Defect(
        "one sample is greedy at any temperature",
        "areno/api/evaluation.py",
        "greedy = temperature is None and (options.greedy or options.eval_n_samples == 1)",
        "greedy = options.greedy or options.eval_n_samples == 1",
        ("tests/api/test_evaluation.py::test_one_sample_is_greedy_unless_a_temperature_is_set_and_several_are_random",),
    ),
    Defect(
        "reference log-probs of other masks reused",
        "areno/training/objectives/reference.py",
        "        key.update(bytes(row.trainable()))",
        "        pass",
        ("tests/api/test_ref_cache.py",),
    ),
    Defect(
        "work stays interruptible",
        "areno/training/stopping.py",
        "            self._interruptible = False",
        "            pass",
        ("tests/api/test_stopping.py",),
    ),
    Defect(
        "common turns trained in each branch",
        "areno/rollouts/conversation/trajectory_rows.py",
        "if turn in places and turn not in done]",
        "if turn in places]",
        ("tests/agentic/test_token_true.py::test_rows_are_what_was_sent_and_sampled",),
    ),
    Defect(
        "samples of a prompt share seeds",
        "areno/rollouts/conversation/recorder.py",
        "self._draws[key] += samples",
        "self._draws[key] += 1",
        (
            "tests/agentic/test_session.py::test_requests_for_the_same_prompt_get_distinct_seeds_that_repeat_in_every_run",
        ),
    ),
    Defect(
        "zero and false dropped from a file",
        "areno/config/yaml_io.py",
        "        if value is not None:",
        "        if value:",
        ("tests/config/test_yaml_io.py",),
    ),
    Defect(
        "larger of two token limits",
        "areno/config/experiment/legacy.py",
        "return min(limits) if",
        "return max(limits) if",
        ("tests/config/experiment/test_legacy.py",),
    ),
    Defect(
        "age bound one version too tight",
        "areno/rollouts/staleness.py",
        "oldest < version - bound",
        "oldest <= version - bound",
        ("tests/experiments/test_staleness.py",),
    ),
    Defect(
        "counters begin anew together",
        "areno/training/frequency.py",
        'self._since = now if "secs" in due else self._since',
        "self._since = now if due else self._since",
        ("tests/experiments/test_frequency.py",),
    ),
    Defect(
        "room on the disk not asked for",
        "areno/training/checkpoints.py",
        "return 0 if copied else backend.checkpoint_bytes()",
        "return 0",
        ("tests/experiments/test_recovery.py::test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_started",),
    ),
    Defect(
        "knobs of the loss not passed on",
        "areno/experiments/trainers/update.py",
        "if name in names} | others)",
        "if name in others} | others)",
        ("tests/experiments/test_settings_update.py::test_each_loss_setting_follows_its_formula",),
    ),
    Defect(
        "samples numbered from 1",
        "areno/observability/samples.py",
        '"sample_index": counts[row.group]}',
        '"sample_index": counts[row.group] + 1}',
        ("tests/observability/test_row_records.py",),
    ),
    Defect(
        "broken weights accepted",
        "areno/rollouts/fleet/tensors.py",
        "checksum.update(raw(tensor).cpu().numpy().data)",
        "pass",
        (
            "tests/experiments/fleet/test_weight_updates.py::test_a_bit_flipped_in_transfer_is_found_and_the_old_weights_stay",
        ),
    ),
    Defect(
        "samples of a group share draws",
        "areno/rollouts/workflows/base.py",
        "EPISODE.set(Episode(group.task_id, index))",
        "EPISODE.set(group)",
        ("tests/experiments/test_agents.py::test_batches_of_agents_keep_groups",),
    ),
    Defect(
        "lost records run once more",
        "areno/rewards/runner.py",
        "batch.losses[index] <= self._retries",
        "batch.losses[index] <= self._retries + 1",
        ("tests/rewards/test_runner_processes.py::test_record_that_kills_its_worker_twice_is_named",),
    ),
    Defect(
        "held back text lost",
        "areno/serving/token_text.py",
        'return "" if self.matched is not None else self._take(len(self._held))',
        'return ""',
        ("tests/serving/test_text.py",),
    ),
    Defect(
        "stop string missed", "areno/text/stop.py", "default=1) - 1", "default=1) - 2", ("tests/text/test_stop.py",)
    ),
    Defect(
        "marker across pieces missed",
        "areno/text/growing.py",
        "len(self.text) - len(marker) + 1)",
        "len(self.text))",
        ("tests/text/test_tool_calls_stream.py::test_streaming_in_any_pieces_gives_the_same_result_as_the_whole_text",),
    ),
    Defect(
        "fastest rank told",
        "areno/observability/stats_collector.py",
        "return max(one, other, key=lambda part: part[1])",
        "return min(one, other, key=lambda part: part[1])",
        ("tests/observability/test_stats_collector.py",),
    ),
    Defect(
        "axis of a service goes back",
        "areno/observability/stats_logger.py",
        "self._x = max(global_step, self._x + 1)",
        "self._x = global_step",
        ("tests/observability/test_stats_logger.py",),
    ),
    Defect(
        "step 0 taken for every step",
        "areno/cli/inspect.py",
        "entries if arguments.step is None else",
        "entries if not arguments.step else",
        ("tests/cli/test_inspect_command.py",),
    ),
    Defect(
        "runs compared by the last phase that differs",
        "areno/reports/divergence.py",
        "key=lambda each: PHASES.index(each.phase))",
        "key=lambda each: -PHASES.index(each.phase))",
        ("tests/reports/test_compare.py",),
    ),
    Defect(
        "moving mean over the values before",
        "areno/reports/plot.py",
        "before, after = (size - 1) // 2, size // 2",
        "before, after = size - 1, 0",
        ("tests/reports/test_plot.py",),
    ),
    Defect(
        "exit code of a command lost",
        "areno/cli/main.py",
        "return int(module.run(argv[1:]))",
        "module.run(argv[1:]); return 0",
        ("tests/engine/test_plan.py::test_a_run_that_does_not_fit_exits_with_1",),
    ),
    Defect(
        "held-out sums trained on",
        "areno/quickstart/task.py",
        "and problem.held_out == held_out:",
        "and problem.held_out >= held_out:",
        ("tests/quickstart/test_task.py::test_training_and_held_out_problems_are_disjoint",),
    ),
)
