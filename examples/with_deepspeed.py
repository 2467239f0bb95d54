"""FusedAdamS with DeepSpeed's ZeRO.

torchrun --nproc-per-node 2 examples/with_deepspeed.py --stage 3
"""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import tiny_task
from swd_fused import FusedAdamS, param_groups
from swd_fused.distributed.deepspeed import follow


def main() -> None:
    options = tiny_task.arguments(__doc__, stage=["1", "2", "3"])
    deepspeed.init_distributed("gloo")
    model = tiny_task.new_model(torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=FusedAdamS(param_groups(model), lr=tiny_task.LR, **tiny_task.DECAY),
        config={
            "train_batch_size": tiny_task.BATCH,
            "gradient_clipping": tiny_task.MAX_GRAD_NORM,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(options.stage)},
        },
    )
    follow(engine)
    dataset = tiny_task.dataset(torch.float32)
    sampler = DistributedSampler(dataset, shuffle=False)
    for x, y in DataLoader(dataset, batch_size=tiny_task.BATCH // dist.get_world_size(), sampler=sampler):
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=options.stage == "3"):
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    if dist.get_rank() == 0:
        print(f"rms gradient {engine.optimizer.optimizer.metrics()['rms_grad']:.6f}")
        tiny_task.save(options.save, weights)
    # DeepSpeed keeps its process groups, and with them gloo's threads. One that still holds a tensor when Python ends
    # aborts the process (pytorch issue 190489), so ranks do not end while others are at work.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
