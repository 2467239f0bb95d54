"""FusedAdamS in the manner of Hugging Face's run_clm: a GPT-2 from its configuration, a text cut into blocks, Trainer.

Trainer makes the optimizer and its parameter groups, from a class and keywords:

torchrun --nproc-per-node 2 examples/with_run_clm.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

import tiny_task
from swd_fused import FusedAdamS, FusedAdamW

BLOCK, WEIGHT_DECAY = 32, 0.1
# In place of optim="adamw_torch_fused", which is Trainer's default.
ADAMS: tuple[type, dict[str, Any]] = (FusedAdamS, {"lr": 1e-3, "adamw_weight_decay": WEIGHT_DECAY})
ADAMW: tuple[type, dict[str, Any]] = (FusedAdamW, {"lr": 1e-3})


def blocks() -> list[dict[str, torch.Tensor]]:
    """Cuts a text into blocks, here by bytes in place of a tokenizer, and as many as fill whole batches."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rest = len(text) % (BLOCK * tiny_task.BATCH)
    return [{"input_ids": block, "labels": block} for block in text[: len(text) - rest].view(-1, BLOCK)]


class InOrder(Trainer):
    """Without shuffling, so that runs can be compared."""

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(optimizer: tuple[type, dict[str, Any]] | None) -> Trainer:
    torch.manual_seed(0)
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # so that runs can be compared
    config = GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=24, n_layer=2, n_head=2, **without_dropout)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            learning_rate=1e-3,
            weight_decay=WEIGHT_DECAY,  # with AdamS it only says that matrices decay
            max_steps=tiny_task.STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        arguments = arguments.set_dataloader(train_batch_size=tiny_task.BATCH // arguments.world_size)
        trainer = InOrder(
            GPT2LMHeadModel(config).double(),
            arguments,
            data_collator=default_data_collator,
            train_dataset=blocks(),
            optimizer_cls_and_kwargs=optimizer,
        )
        trainer.train()
    return trainer


def main() -> None:
    kinds = {"adams": ADAMS, "adamw": ADAMW, "torch": None}
    options = tiny_task.arguments(__doc__, optimizer=list(kinds))
    trainer = trained(kinds[options.optimizer])
    if trainer.is_world_process_zero():
        optimizer: Any = trainer.optimizer
        if kinds[options.optimizer] is not None:
            print(f"rms gradient {optimizer.optimizer.metrics()['rms_grad']:.6f}")  # Accelerate has wrapped FusedAdamS
        tiny_task.save(options.save, trainer.model.state_dict())


if __name__ == "__main__":
    main()
