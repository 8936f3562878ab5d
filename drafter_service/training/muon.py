"""Muon whose steps are whitened in float32, for processors without bfloat16 products.

torch.optim.Muon whitens in bfloat16. A processor without such products emulates them, which took three fifths of a
training step of the demo's drafter on an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the iteration X <- a X + (b G + c G G) X with G = X X^T (Jordan et al. 2024, "Muon"). Five
iterations bring every singular value that is not tiny to between about 0.7 and 1.2."""
ITERATIONS = 5


def whitened(matrix: Tensor) -> Tensor:
    """The matrix with singular values near 1 and the same singular vectors, by Newton-Schulz iterations in float32.

    matrix, result [rows, columns]
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).float()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` and Nesterov's momentum, in float32. Its saved state is
    interchangeable with torch.optim.Muon's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients. Raises ValueError for a closure: none is supported."""
        if closure is not None:
            raise ValueError("closure: none is supported")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = whitened(weight.grad.lerp(average, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)
