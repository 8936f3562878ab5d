"""A bridge between tokenizers: a drafter of one tokenizer drafts for a target of another.

target ids -> bytes -> drafter ids -> [ drafter engine ] -> tree of drafter ids -> tree of target ids

`byte_codec` encodes and decodes bytes, `translation` translates the text, `kinds` and `branches` translate trees,
`drafter` puts a bridge around an engine. Guesses may be any target ids, so no bridge can change a token of an answer.
"""
