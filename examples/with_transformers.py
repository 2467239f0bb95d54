"""FusedAdamS with Hugging Face's Trainer, which takes an optimizer that was made before.

torchrun --nproc-per-node 2 examples/with_transformers.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, default_data_collator

import tiny_task
from swd_fused import FusedAdamS, param_groups


class WithLoss(nn.Module):
    """As Trainer wants a model: it returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_task.new_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.model(x), labels)}


class InOrder(Trainer):
    """Without shuffling, so that runs can be compared."""

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main() -> None:
    options = tiny_task.arguments(__doc__)
    model = WithLoss()
    groups = param_groups(model)
    optimizer = FusedAdamS(groups, lr=tiny_task.LR, max_grad_norm=tiny_task.MAX_GRAD_NORM, **tiny_task.DECAY)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    samples = [{"x": x, "labels": y} for x, y in tiny_task.dataset()]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            max_grad_norm=0,  # FusedAdamS clips
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        arguments = arguments.set_dataloader(train_batch_size=tiny_task.BATCH // arguments.world_size)
        trainer = InOrder(
            model,
            arguments,
            data_collator=default_data_collator,
            train_dataset=samples,
            optimizers=(optimizer, scheduler),
        )
        trainer.train()
    if trainer.is_world_process_zero():
        print(f"rms gradient {optimizer.metrics()['rms_grad']:.6f}")
        tiny_task.save(options.save, model.state_dict())


if __name__ == "__main__":
    main()
