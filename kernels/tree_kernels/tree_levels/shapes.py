"""The arguments of `levels`: which word holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

(
    FORWARD,  # kernels, called with the address of MODEL
    LOGITS,
    RANKING,  # a kernel, called with the address of RANKED
    MODEL,  # words of a model's forward and logits
    RANKED,  # words of the ranking; its rows are the rows of all levels
    LEVELS,
    COUNTS,  # [levels] rows of each level
    ENTRIES,  # entries of the first level; each later level has one for each row
    TOKENS,  # [rows]; tokens of the second level and below are written here
    ABOVE,  # [rows] each row's parent, as a row; unused for the first level
    RANKS,  # [rows] which of its parent's guesses the row is; unused for the first level
    ROWS_AT,  # the word of MODEL with the number of rows
    TOKENS_AT,  # the word of MODEL with the address of their tokens
    COUNT_AT,  # the word of MODEL with the number of entries of the table of rows
    TABLE_AT,  # the word of MODEL with its address
    # TEXTS_AT: the word of MODEL with the number of texts whose tokens come before the first level's nodes. It is set
    # to 0 after each level, and may be the word at COUNT_AT, which is set before each level.
    TEXTS_AT,
    TABLE,  # entries of all levels
    ENTRY,  # bytes of an entry
    HEAD,  # a kernel, called with the address of HEAD_WORDS after each ranking; 0: none
    HEAD_WORDS,  # words of the acceptance head; its rows are the rows of all levels
    FOLD,  # a kernel, called with the address of MODEL before the first level if there are folds; 0: none
    FOLDS_AT,  # the word of MODEL with the number of folds, set to 0 when they are done
) = range(22)
CALL_WORDS = 22
