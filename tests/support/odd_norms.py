"""Norms that look like RMSNorm and are none."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaRMSNorm


class LimitedRMSNorm(LlamaRMSNorm):
    """Limits its rows, at a number that ordinary ones do not have."""

    def forward(self, hidden_states):
        return super().forward(hidden_states.clamp(-300, 300))


class OuterEpsilonRMSNorm(LlamaRMSNorm):
    """Adds its epsilon to the root, which shows in small rows alone."""

    def forward(self, x):
        return self.weight * (x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon))
