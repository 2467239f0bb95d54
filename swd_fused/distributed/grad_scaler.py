"""Loss scaling on any meshes: an infinity in one rank's gradients makes all ranks skip the step."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from swd_fused.distributed.sharding import local_tensor


class MeshGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a FusedAdamS whose parameters are sharded in several ways.

    torch's own looks at the mesh of the first gradient only. With tensor parallelism and FSDP together some ranks would
    skip a step that others take, and wait for; with plain tensors beside DTensors it raises.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        from swd_fused.optimizer import FusedAdamS

        if not isinstance(optimizer, FusedAdamS):
            raise TypeError(f"MeshGradScaler got a {type(optimizer).__name__}, wanted a FusedAdamS.")
        grads: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param.grad is None:
                    continue
                if param.grad.dtype == torch.float16 and not allow_fp16:
                    raise ValueError(
                        "MeshGradScaler got a float16 gradient, wanted float32 ones. Use autocast, which keeps them so."
                    )
                grad = local_tensor(param.grad)
                grads[grad.device, grad.dtype].append(grad)
            found = {device: found_inf.to(device, copy=True) for device, _ in grads}
            for (device, _), same in grads.items():
                torch._amp_foreach_non_finite_check_and_unscale_(same, found[device], inv_scale.to(device))
            here = torch.stack([found_inf, *(value.to(found_inf.device) for value in found.values())]).amax(0)
            return {found_inf.device: optimizer.collective().largest(here)}
