"""The forms in which weights of a GGUF file stay quantised. Imports no torch: commands that load no model read it."""

from __future__ import annotations

FORMS_OF = {"Q4_0": "Q4_1", "Q4_1": "Q4_1", "Q5_0": "Q8_0", "Q8_0": "Q8_0", "Q4_K": "Q4_K", "Q6_K": "Q6_K"}
"""Names of `tree_kernels.matmul.quantised_shapes.QuantisedForm`, by the file's names of its types."""
