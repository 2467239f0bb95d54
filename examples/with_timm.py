"""FusedAdamS with timm, by the name that `--opt` of its train.py takes.

torchrun --nproc-per-node 2 examples/with_timm.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tiny_task
from swd_fused.integrations.timm import register


def main() -> None:
    options = tiny_task.arguments(__doc__)
    dist.init_process_group("gloo")
    register()
    model = tiny_task.new_model()
    optimizer = create_optimizer_v2(
        model,
        "fusedadams",
        lr=tiny_task.LR,
        weight_decay=tiny_task.DECAY["adamw_weight_decay"],  # AdamW's value
        calibration_steps=tiny_task.DECAY["calibration_steps"],
        max_grad_norm=tiny_task.MAX_GRAD_NORM,
    )
    replicated = DistributedDataParallel(model)
    sampler = DistributedSampler(tiny_task.dataset(), shuffle=False)
    for x, y in DataLoader(tiny_task.dataset(), batch_size=tiny_task.BATCH // dist.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(replicated(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"rms gradient {optimizer.metrics()['rms_grad']:.6f}")
        tiny_task.save(options.save, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
