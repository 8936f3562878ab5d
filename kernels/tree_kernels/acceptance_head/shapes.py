"""The arguments of `chances`: which word holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

(
    MODEL,  # words of a model's forward, `mamba_level.shapes`: rows, NORMED and LOGITS of these rows, the embedding
    RANKED,  # words of the ranking, `ranking.shapes`, of the same rows, with its results
    BLOCKS,
    BLOCK_TABLE,  # [BLOCKS] addresses of products' words
    HIDDEN_SCALE,  # [d] float32, as are all below
    TOKEN_SCALE,  # [d]
    NUMBERS,  # [numbers, d]
    BIAS,  # [d]
    OUTPUT,  # [OUTPUTS, d]
    OUTPUT_BIAS,  # [OUTPUTS]
    CALIBRATION,  # [CALIBRATED, OUTPUTS]
    CALIBRATED,  # depths
    CANDIDATES,  # K
    DEPTHS,  # [rows] int64
    CHANCES,  # [rows, guesses of a row]; the result
    X,  # [rows, STEP / 4] scratch
    SUMS,  # [rows, STEP / 4] scratch
    STEP,  # bytes of a row of X and of SUMS, in whole panels
    SPARE,  # [max(d, 2)] scratch
) = range(19)
CALL_WORDS = 19
