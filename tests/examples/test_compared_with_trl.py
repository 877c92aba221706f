"""The templates `sft` and `dpo` compute the loss of TRL's trainers at every step, on the same batches."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from pipeline import chat_labels, mask_between_texts, pack_texts
from pipeline.contract.config import load_config, override_config
from pipeline.contract.data import open_split
from pipeline.contract.pretrained import copy_small_files, find_pretrained
from pipeline.contract.task import load_task, make_shared_files
from pipeline.system.processes import Rank
from pipeline.system.sources import SOURCE_ROOT
from train.checkpoint.store import CheckpointStore
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

CPU = ProcessGroup(Rank(), torch.device("cpu"))
STEPS, BATCH, LR = 4, 8, 0.003


class Recorder:
    """A log that keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def record(self, step: int, epoch: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])


class Project:
    """A template with its made-up data, of which a few samples are used."""

    def __init__(self, name: str, folder: Path, samples: int) -> None:
        self.folder = folder
        for path in (SOURCE_ROOT / "examples" / "templates" / name).glob("*.*"):
            (folder / path.name).write_bytes(path.read_bytes())
        source = folder / "make_data.py"
        source.write_text(source.read_text().replace("_STEPS = 150", "_STEPS = 2"))
        subprocess.run([sys.executable, "-B", "make_data.py"], cwd=folder, check=True, capture_output=True)
        for split, count in {"train": samples, "validation": 4, "test": 4}.items():
            path = folder / "data" / f"{split}.jsonl"
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
        self.rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
        self.config = load_config(folder / "pipe.yaml")
        self.task: Any = load_task(self.config.task, folder)
        pretrained = find_pretrained(self.config, folder)
        assert pretrained
        copy_small_files(pretrained, folder / "files")
        make_shared_files(self.task, folder / "files")
        vars(self.task)["model"] = lambda: mask_between_texts(self.base())  # not its random weights

    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "data" / "base", dtype=torch.float32)

    def train(self, **settings: Any) -> tuple[list[float], list[list[int]]]:
        """Return the loss of each step, and the rows of its batch."""
        words = {"epochs": 1, "lr": LR, "schedule": "constant", "warmup_ratio": 0, "log_every": 1, "device": "cpu"}
        values = [f"train.{name}={value}" for name, value in {**words, **settings}.items()]
        config, log = override_config(self.config, values), Recorder()
        splits = open_split(self.task, "train"), open_split(self.task, "validation")
        trainer = Trainer(self.task, config, CPU, *splits, BATCH)
        output: Any = log
        trainer.fit(Progress(), CheckpointStore(self.folder / "checkpoints", 2, {}), output)
        return log.losses, [trainer.order.batch(step).tolist() for step in range(trainer.total_steps)]

    def losses_of_trl(self, kind: str, batches: Sequence[list[int]], **options: Any) -> list[float]:
        """Return the loss of each step of a trainer of TRL on these samples."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
            losses: list[float] = []

            class SameBatches(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
                def get_train_dataloader(self) -> Any:
                    return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

                def training_step(self, *arguments: Any, **keywords: Any) -> Any:
                    loss = super().training_step(*arguments, **keywords)
                    losses.append(float(loss))
                    return loss

            arguments = getattr(trl, f"{kind}Config")(
                output_dir=str(self.folder / "trl"), max_steps=len(batches), learning_rate=LR, weight_decay=0.0,
                lr_scheduler_type="constant", max_grad_norm=1.0, optim="adamw_torch", bf16=False, use_cpu=True,
                report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, **options,
            )  # fmt: skip
            trainer = SameBatches(
                self.base(),
                args=arguments,
                train_dataset=datasets.Dataset.from_list(self.rows),
                processing_class=self.task.tokenizer,
            )
            trainer.train()
        return losses


@pytest.mark.long
def test_packed_conversations_give_the_losses_of_sft_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project("sft", tmp_path, samples=60)
    lengths = [len(chat_labels(project.task.tokenizer, row["messages"])[0]) for row in project.rows]
    packed = pack_texts([[index] * length for index, length in enumerate(lengths)], 128, pad=-1).ids
    losses, rows = project.train(batch_size=BATCH, accumulate=3)  # in parts with different numbers of tokens
    batches = [sorted({int(index) for row in step for index in packed[row]} - {-1}) for step in rows]
    assert sum(map(len, batches)) == len(project.rows) > 1.5 * sum(map(len, rows)), "rows hold several conversations"
    expected = project.losses_of_trl("SFT", batches, assistant_only_loss=True, packing=False)
    assert len(losses) == len(batches) >= STEPS - 1
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
def test_pairs_in_a_row_give_the_losses_of_dpo_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project("dpo", tmp_path, samples=STEPS * BATCH)
    losses, batches = project.train(batch_size=BATCH)
    expected = project.losses_of_trl("DPO", batches, beta=0.1)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < losses[0]
