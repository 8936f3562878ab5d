"""A training loop with a time budget, which resumes after a kill.

The schedule runs in wall-clock time (or in steps, for tests): the learning rate depends on the fraction of the budget
that is spent, so a slow machine trains less and still ends at the final learning rate. Everything that the next step
depends on is saved every `save_every_s` seconds; a run that was killed resumes from there.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from dendro.errors import DendroError
from torch import Tensor, nn

from drafter_service.training.muon import Float32Muon
from drafter_service.training.saving import replacing


@dataclass(frozen=True, slots=True)
class Budget:
    """Length of a training run: seconds of training, or steps."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("a budget is either seconds or steps")

    def spent(self, seconds: float, steps: int) -> float:
        """Fraction of the budget that is used up; training ends at 1."""
        if self.steps is not None:
            return steps / self.steps
        assert self.seconds is not None
        return seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of the optimisers and their schedule."""

    budget: Budget
    matrix_rate: float = 4e-3  # Muon, for the matrices inside the layers
    other_rate: float = 2e-3  # AdamW, for embeddings, norms, biases and state-space parameters
    matrix_decay: float = 0.05
    warm_up: float = 0.02  # fraction of the budget in which rates rise
    final_rate: float = 0.02  # share of the peak rate that is left at the end, reached on a cosine
    clip: float = 1.0
    save_every_s: float = 45.0

    def rate(self, spent: float) -> float:
        """Factor on both learning rates when a fraction `spent` of the budget is used up.

        >>> [round(Recipe(Budget(steps=100)).rate(spent), 3) for spent in (0.01, 0.02, 0.51, 1.0)]
        [0.5, 1.0, 0.51, 0.02]
        """
        if spent < self.warm_up:
            return max(spent, 1e-3) / self.warm_up
        cooled = (min(spent, 1.0) - self.warm_up) / (1 - self.warm_up)
        return self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * cooled))


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training run after a step."""

    step: int
    spent: float  # fraction of the budget
    seconds: float  # seconds of training, over all resumed runs
    loss: float  # nats per token, running mean
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a finished run."""

    steps: int
    tokens: int
    seconds: float
    loss: float  # nats per token, running mean at the end


def has_cpp_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++"))


def compiled(module: nn.Module) -> Callable[..., Any]:
    """The module's forward, fused by torch.compile where a C++ compiler is installed (1.5 times as fast on a CPU)."""
    if not has_cpp_compiler():
        return module
    torch._dynamo.config.suppress_errors = True  # train unfused if the compiler fails
    fused = torch.compile(module)
    assert callable(fused)
    return fused


def has_bf16_products(device: torch.device) -> bool:
    """True if the device multiplies in bfloat16: GPUs, and CPUs with the instructions."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which products are bfloat16 if the device has such products, else float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if has_bf16_products(device) else nullcontext()


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the projections inside the layers, AdamW for the rest.

    Muon's whitened steps need about half the tokens of AdamW's to reach a given loss at this size. A Mamba's `dt_proj`
    sets time scales and its gradients differ from a projection's: AdamW.
    """
    matrices: list[Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "dt_proj")):
            matrices.append(module.weight)
    chosen = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muon = torch.optim.Muon if all(has_bf16_products(matrix.device) for matrix in matrices) else Float32Muon
    return [
        muon(
            matrices,
            lr=recipe.matrix_rate,
            momentum=0.95,
            weight_decay=recipe.matrix_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


class Diverged(DendroError):
    """A step of a training run has no finite loss or gradient; its saved state is of an earlier step."""


class Trainer:
    """Trains `model` on the loss that `batch_loss` returns for each step, and saves its state to `state_path`.

    `batch_loss(step)` runs the forward of step 0, 1, ... and returns its loss in nats per token; it must depend on the
    step alone, so that a resumed run sees the same rows as an uninterrupted one. Where several `processes` train
    together, each has a share of the rows, and their gradients are averaged in the backward of the loss; the first
    process's time decides for all how much of the budget is spent, and it alone saves.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_loss: Callable[[int], Tensor],
        tokens_per_step: int,
        recipe: Recipe,
        state_path: Path,
        processes: Accelerator | None = None,
        seed: int = 0,
    ) -> None:
        """seed: seed of the model's dropout"""
        self.model = model
        self.batch_loss = batch_loss
        self.tokens_per_step = tokens_per_step
        self.recipe = recipe
        self.state_path = state_path
        self.processes = processes if processes is not None and processes.num_processes > 1 else None
        self.seed = seed
        self.optimizers = optimizers(model, recipe)
        self.step = 0
        self.seconds = 0.0
        self.mean_loss = math.nan
        if state_path.exists():
            self._load()

    def run(self, on_step: Callable[[Progress], None], stop_at_step: int | None = None) -> Trained:
        """Train until the budget is spent (or, for tests, up to `stop_at_step`); the last state is saved. Raises
        Diverged."""
        self.model.train()
        saved_at = started = time.monotonic()
        before = self.seconds
        while (spent := self._spent()) < 1 and self.step != stop_at_step:
            step_started = time.monotonic()
            loss = self._take_step(self.recipe.rate(spent))
            self.mean_loss = loss if math.isnan(self.mean_loss) else 0.98 * self.mean_loss + 0.02 * loss
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - started
            speed = self.tokens_per_step / (now - step_started)
            spent = self.recipe.budget.spent(self.seconds, self.step)
            on_step(Progress(self.step, spent, self.seconds, self.mean_loss, speed))
            if now - saved_at > self.recipe.save_every_s:
                self._save()
                saved_at = time.monotonic()
        self._save()
        return Trained(self.step, self.step * self.tokens_per_step, self.seconds, self.mean_loss)

    def _spent(self) -> float:
        """Fraction of the budget that is used up, equal in all processes."""
        spent = self.recipe.budget.spent(self.seconds, self.step)
        if self.processes is None:
            return spent
        return float(broadcast(torch.tensor([spent], dtype=torch.float64, device=self.processes.device)).item())

    def _take_step(self, rate: float) -> float:
        self._seed_dropout()
        loss = self.batch_loss(self.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        if not bool(torch.isfinite(loss.detach() + norm)):
            raise Diverged(
                f"step {self.step}: the loss is {loss.item():g} and the norm of its gradient {norm.item():g}; it is "
                "not saved. Begin anew with --no-resume and another --seed; if that ends so too, the labels are not "
                "finite: check the target's weights, or give it dtype float32"
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak_lr", group["lr"]) * rate
            optimizer.step()
            optimizer.zero_grad()
        if self.processes is not None:
            loss = self.processes.reduce(loss.detach(), reduction="mean")
        return float(loss.item())

    def _seed_dropout(self) -> None:
        """Set the default generator, from which dropout is drawn: each step and each process has numbers of its own,
        which a resumed run has again."""
        place, count = 0, 1
        if self.processes is not None:
            place, count = self.processes.process_index, self.processes.num_processes
        torch.manual_seed((self.seed * 1_000_003 + self.step * count + place) % (1 << 63))

    def _save(self) -> None:
        """Save the state. A kill meanwhile, or a full disk, which raises NotSaved, leaves the previous state."""
        if self.processes is not None and not self.processes.is_main_process:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "mean_loss": self.mean_loss,
        }
        with replacing(self.state_path) as partial:
            torch.save(state, partial)

    def _load(self) -> None:
        state = torch.load(self.state_path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.mean_loss = state["step"], state["seconds"], state["mean_loss"]
