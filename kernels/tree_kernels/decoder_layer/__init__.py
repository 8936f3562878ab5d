"""Decoder layers, each an attention and a gated MLP with norms and residuals, as one compiled call."""

from tree_kernels.decoder_layer.cpu import DecoderLayers, LayerWeights, Workspace, why_not_compiled

__all__ = ["DecoderLayers", "LayerWeights", "Workspace", "why_not_compiled"]
