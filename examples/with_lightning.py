"""FusedAdamS with Lightning: DDP, or FSDP2 by its ModelParallelStrategy.

python examples/with_lightning.py --strategy fsdp2
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import tiny_task
from swd_fused import FusedAdamS, param_groups

RANKS = 2


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_task.new_model()

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = param_groups(self)
        return FusedAdamS(groups, lr=tiny_task.LR, max_grad_norm=tiny_task.MAX_GRAD_NORM, **tiny_task.DECAY)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        sampler = DistributedSampler(tiny_task.dataset(), RANKS, self.global_rank, shuffle=False)
        return DataLoader(tiny_task.dataset(), batch_size=tiny_task.BATCH // RANKS, sampler=sampler)


def main() -> None:
    options = tiny_task.arguments(__doc__, strategy=["ddp", "fsdp2"])
    strategy = DDPStrategy(process_group_backend="gloo")
    if options.strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module)
    weights = get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True))
    if trainer.is_global_zero:
        print(f"rms gradient {trainer.optimizers[0].metrics()['rms_grad']:.6f}")
        tiny_task.save(options.save, weights)


if __name__ == "__main__":
    main()
