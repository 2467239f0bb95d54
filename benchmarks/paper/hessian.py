"""The largest eigenvalues of the Hessian of the training loss, by Lanczos with Hessian-vector products."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it


def top_eigenvalues(model: nn.Module, images: Tensor, labels: Tensor, count: int, seed: int) -> list[float]:
    """Largest first, of the mean loss over these images, with BatchNorm's running statistics as in testing.

    scipy's eigsh is ARPACK's restarted Lanczos. 1% is far below the spread between seeds.
    """
    model.eval()
    params = [param for param in model.parameters() if param.requires_grad]
    loss = F.cross_entropy(model(images), labels)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    flat_grad = torch.cat([grad.flatten() for grad in grads])

    def product(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(vector.reshape(-1)).to(flat_grad)
        parts = torch.autograd.grad(flat_grad @ direction, params, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts]).double().cpu().numpy()

    size = flat_grad.numel()
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(size)
    values = eigsh(operator, k=count, which="LA", v0=start, tol=0.01, return_eigenvectors=False)
    return [float(value) for value in sorted(values, reverse=True)]
