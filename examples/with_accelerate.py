"""FusedAdamS with Hugging Face Accelerate.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tiny_task
from swd_fused import FusedAdamS, param_groups


def main() -> None:
    options = tiny_task.arguments(__doc__)
    accelerator = Accelerator(cpu=True)
    model = tiny_task.new_model()
    groups = param_groups(model)
    optimizer = FusedAdamS(groups, lr=tiny_task.LR, max_grad_norm=tiny_task.MAX_GRAD_NORM, **tiny_task.DECAY)
    loader = DataLoader(tiny_task.dataset(), batch_size=tiny_task.BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    accelerator.print(f"rms gradient {optimizer.optimizer.metrics()['rms_grad']:.6f}")  # prepare has wrapped FusedAdamS
    if accelerator.is_main_process:
        tiny_task.save(options.save, accelerator.unwrap_model(model).state_dict())


if __name__ == "__main__":
    main()
