"""Breaks of train: steps, data, checkpoints, the ledger, restarts, parallelism and pretrained weights."""

from __future__ import annotations

from tests.breaks.breaks import Break

BREAKS: tuple[Break, ...] = (
    # One optimizer step: accumulation, clipping and update.
    Break(
        "each micro-batch counts as a whole batch",
        "train/parallel/base.py",
        "self.objective.backward(loss * micro_batch.fraction * self.group.data_size)",
        "self.objective.backward(loss * self.group.data_size)",
        "tests/train/test_trainer.py::test_micro_batches_give_the_gradient_of_the_whole_batch",
    ),
    Break(
        "clip_norm limits nothing",
        "train/parallel/base.py",
        "if limit and not (norm.device.type",
        "if not limit and not (norm.device.type",
        "tests/train/test_trainer.py::test_a_gradient_is_clipped_to_the_norm[fp32]",
    ),
    Break(
        "a gradient in fp16 is clipped before it is unscaled",
        "train/trainer.py",
        "        self._precision.unscale(self._optimizer)\n",
        "",
        "tests/train/test_trainer.py::test_a_gradient_is_clipped_to_the_norm[fp16]",
    ),
    Break(
        "the learning rate stays where it was when training started",
        "train/trainer.py",
        "        set_learning_rate(self._optimizer, learning_rate(step, self.total_steps, self.config))\n",
        "",
        "tests/train/test_trainer.py::test_every_step_has_the_learning_rate_of_the_schedule[5]",
    ),
    Break(
        "a loss that is not a number passes",
        "train/metrics.py",
        "is_nonfinite = window.first_nonfinite()[0] is not None",
        "is_nonfinite = window.first_nonfinite()[1] is not None",
        "tests/train/test_trainer.py::test_nonfinite_loss_with_finite_gradient_stops_training[10-nan-fp32]",
    ),
    Break(
        "biases and norms decay",
        "train/optim.py",
        "(parameter.ndim > 1, mesh)",
        "(parameter.ndim > 0, mesh)",
        "tests/train/test_trainer.py::test_biases_and_norms_do_not_decay_and_frozen_weights_are_left_out[adamw]",
    ),
    # Data and random numbers.
    Break(
        "the last samples of a split are never used",
        "train/batch_order.py",
        "self.samples * offset // steps, self.samples * (offset + 1) // steps",
        "self.samples // steps * offset, self.samples // steps * (offset + 1)",
        "tests/train/test_batch_order.py::test_every_sample_comes_exactly_once_an_epoch[37-8]",
    ),
    Break(
        "two processes train on the same samples",
        "train/process_group.py",
        "range(count * self.data_rank // self.data_size, count * (self.data_rank + 1) // self.data_size)",
        "range(count // self.data_size)",
        "tests/train/test_step.py::test_two_processes_train_the_weights_that_one_does",
    ),
    Break(
        "a resumed run draws other random numbers",
        "train/trainer.py",
        "if request.part == 0:",
        "if request.part == 0 and step == 0:",
        "tests/train/test_step.py::test_resumed_run_ends_with_identical_weights",
    ),
    Break(
        "training accepts other data than those that were checked",
        "train/__main__.py",
        "samples.in_memory and fingerprint(samples)",
        "not samples.in_memory and fingerprint(samples)",
        "tests/train/test_step.py::test_data_that_changed_since_prepare_are_refused",
    ),
    # Validation and the choice of the weights.
    Break(
        "the validation loss is a mean of batches, not of samples",
        "train/validation.py",
        '"loss": float(task.loss(outputs, batch)) * weight, _WEIGHT: weight',
        '"loss": float(task.loss(outputs, batch)), _WEIGHT: 1',
        "tests/train/test_validation.py::test_validation_mean_is_over_samples[3]",
    ),
    Break(
        "the worst checkpoint counts as the best",
        "train/trainer.py",
        "loss < progress.best_loss",
        "loss > progress.best_loss",
        "tests/train/test_trainer.py::test_a_better_epoch_becomes_the_best_and_patience_starts_anew",
    ),
    Break(
        "the last weights become the model instead of the best",
        "train/__main__.py",
        "store.load(progress.best_step)",
        "store.load(progress.step)",
        "tests/train/test_step.py::test_the_best_weights_become_the_model",
    ),
    # Checkpoints and snapshots.
    Break(
        "a checkpoint with a flipped bit is loaded",
        "train/checkpoint/load.py",
        "size != file.bytes or digest",
        "size != file.bytes and digest",
        "tests/train/checkpoint/test_load.py::test_flipped_bit_of_a_weight_is_damage",
    ),
    Break(
        "a run continues a checkpoint of another batch order",
        "train/checkpoint/load.py",
        "if manifest.identity != identity:",
        "if not manifest.identity:",
        "tests/train/checkpoint/test_store.py::test_checkpoint_of_another_batch_order_is_skipped[change0]",
    ),
    Break(
        "the best checkpoint is deleted as an old one",
        "train/checkpoint/store.py",
        """[-self._keep :], progress.best_step}
        kept_steps |= {self._best_step(step) for step in kept_steps.intersection(earlier_steps)}
""",
        "[-self._keep :]}\n",
        "tests/train/checkpoint/test_store.py::test_newest_and_best_checkpoints_are_kept",
    ),
    Break(
        "training goes on although no checkpoint can be written",
        "train/checkpoint/store.py",
        "            raise self._background.broadcast(failure)",
        "            self._background.broadcast(failure)",
        "tests/train/checkpoint/test_store.py::test_full_disk_names_host_and_last_good_checkpoint",
    ),
    Break(
        "a half uploaded checkpoint counts as complete",
        "train/checkpoint/storage.py",
        'step: self._files.exists(f"{self._step_folder(step)}/{MANIFEST_NAME}") for step in steps',
        "step: self._files.exists(self._step_folder(step)) for step in steps",
        "tests/train/checkpoint/test_storage.py::test_checkpoint_without_manifest_is_ignored_and_removed",
    ),
    Break(
        "a resumed run forgets the state of its optimizer",
        "train/parallel/base.py",
        'return {**add_prefix("weights.", weights), **add_prefix("optimizer.", optimizer_state)}',
        'return add_prefix("weights.", weights)',
        "tests/train/checkpoint/test_store.py::test_training_resumes_bit_for_bit_from_a_checkpoint[adamw]",
    ),
    Break(
        "a resumed run forgets its loss scale",
        "train/parallel/base.py",
        "            self.objective.precision.restore(saved.scaler)",
        "            self.objective.precision.overflows = saved.scaler['overflows']",
        "tests/train/checkpoint/test_store.py::test_loss_scale_is_restored",
    ),
    # The ledger, which verifies that every sample was used once, with its contents.
    Break(
        "a repeated sample makes up for a lost one",
        "train/ledger.py",
        "lost -= int(counts[counts < 0].sum())",
        "lost -= min(0, int(counts.sum()))",
        "tests/train/test_ledger_verification.py::test_any_damage_is_noticed_and_counted",
    ),
    Break(
        "only the first values of a sample are compared",
        "train/sample_checksums.py",
        "rows[:, :: -(-rows.shape[1] // _VALUES)]",
        "rows[:, :_VALUES]",
        "tests/train/test_sample_checksums.py::test_checksums_cover_the_whole_width_of_a_sample",
    ),
    # Restarts and hangs.
    Break(
        "training that always dies at a checkpoint is started again forever",
        "pipeline/contract/restarts.py",
        "attempts[-1].has_checkpoint and not any(attempt.has_checkpoint for attempt in attempts[:-1])",
        "attempts[-1].has_checkpoint",
        "tests/pipeline/contract/test_restarts.py::test_checkpoints_that_are_never_renamed_do_not_reset_the_count",
    ),
    Break(
        "a failure without a reason is tried again like a lost process",
        "train/elastic/agent.py",
        "passing=causes[rank] == 1",
        "passing=True",
        "tests/train/elastic/test_agent.py::test_a_failure_without_an_error_is_permanent",
    ),
    Break(
        "a machine with another task.py joins",
        "pipeline/training/node.py",
        "if self.joined and attempts == 0:",
        "if self.joined and attempts > 0:",
        "tests/pipeline/training/test_node.py::test_a_machine_with_other_software_does_not_join",
    ),
    Break(
        "a process that makes progress counts as hung",
        "train/hang_report.py",
        "return any(report.still_seconds < ",
        "return all(report.still_seconds < ",
        "tests/train/test_hang_report.py::test_no_culprit_while_any_process_makes_progress",
    ),
    # Several processes.
    Break(
        "a gradient that is too old is applied",
        "train/parameter_server.py",
        "self.updates - result.version > self._staleness",
        "self.updates - result.version > self._staleness + 1",
        "tests/train/parallel/test_parameter_server.py::test_gradient_beyond_max_staleness_is_computed_again",
    ),
    Break(
        "what compression did not send is lost at a restart",
        "train/parallel/compression.py",
        "        return self._compressor.state()",
        "        return {}",
        "tests/train/parallel/test_compression.py::test_compressed_runs_learn_and_resume_to_the_same_bits",
    ),
    # Pretrained weights and adapters.
    Break(
        "a weight that no file has is initialized silently",
        "train/pretrained/load.py",
        '"missing": _disallowed(self.missing, allow)',
        '"missing": {}',
        "tests/train/pretrained/test_matching.py::test_all_differences_are_reported_at_once",
    ),
    Break(
        "experts change places",
        "train/pretrained/load.py",
        "_stack(sorted(names[p], key=_expert_number), sources)",
        "_stack(sorted(names[p]), sources)",
        "tests/train/pretrained/test_architectures.py::test_experts_are_in_the_order_of_their_numbers",
    ),
    Break(
        "the deployed model lacks what its adapter learned",
        "train/pretrained/adapter.py",
        "        layer.merge(safe_merge=True)\n",
        "",
        "tests/train/pretrained/test_adapter.py::test_peft_reads_the_adapter_and_merges_it_to_the_same_bits",
    ),
)
