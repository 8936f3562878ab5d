"""A decoder layer's attention and gated MLP, with their norms and residuals, as one compiled call."""

from tree_kernels.decoder_layer.cpu import DecoderLayer, LayerWeights, Workspace, why_not_compiled

__all__ = ["DecoderLayer", "LayerWeights", "Workspace", "why_not_compiled"]
