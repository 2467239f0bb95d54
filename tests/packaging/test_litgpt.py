"""litgpt's models and its `--optimizer`, as `litgpt pretrain` puts them together by Lightning Fabric.

Skipped where litgpt is missing. `make frameworks` puts it where `any_torchvision` finds it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.packaging import any_torchvision

STEPS = 5
pytestmark = pytest.mark.filterwarnings("default")  # litgpt's own


@pytest.fixture(scope="module")
def litgpt() -> Any:
    any_torchvision.prepare()
    pytest.importorskip("lightning")
    return pytest.importorskip("litgpt")


def trained(litgpt: Any, optimizer: str | dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    """Trains with the calls of litgpt.pretrain: it sets `lr` in groups by itself, and clips by Fabric."""
    import lightning
    from litgpt.utils import instantiate_torch_optimizer

    torch.manual_seed(0)
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "intermediate_size": 32, "padded_vocab_size": 64, "block_size": 8}
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(litgpt.GPT(litgpt.Config(**size)).double())
    made = fabric.setup_optimizers(instantiate_torch_optimizer(optimizer, model.parameters(), fused=False))
    data = torch.randint(64, (STEPS, 4, 9), generator=torch.Generator().manual_seed(1))
    for step, tokens in enumerate(data):
        for group in made.param_groups:
            group["lr"] = made.defaults["lr"] * (1 - step / STEPS)
        logits = model(tokens[:, :-1])
        fabric.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        fabric.clip_gradients(model, made, max_norm=0.5)
        made.step()
        made.zero_grad()
    return [param.detach() for param in model.parameters()], made


def of(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "swd_fused.FusedAdamS", "init_args": {"lr": 1e-2, **arguments}}


def test_class_path_with_arguments(litgpt: Any) -> None:
    """AdamW by ours is torch's, and AdamS decays like it until calibration ends."""
    reference = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2, "weight_decay": 0.1}}
    expected, _ = trained(litgpt, reference)
    for ours in (of(decay="decoupled", weight_decay=0.1), of(adamw_weight_decay=0.1)):
        for param, value in zip(trained(litgpt, ours)[0], expected, strict=True):
            torch.testing.assert_close(param, value, rtol=0, atol=1e-10)


def test_name_alone_means_the_papers_lambda(litgpt: Any) -> None:
    _, optimizer = trained(litgpt, "swd_fused.FusedAdamS")
    assert optimizer.param_groups[0]["weight_decay"] == 5e-4
    assert optimizer.metrics()["rms_grad"] > 0
