"""Loads the tokenizer of a Hugging Face checkpoint folder through transformers, never with code from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest
from tree_layers.errors import CheckpointError
from tree_layers.token_bytes import token_bytes
from tree_layers.tokens import TOKENIZER, TOKENIZER_CONFIG

RESERVED = frozenset(
    {
        *(
            "add_generation_prompt",
            "chat_template",
            "continue_final_message",
            "conversation",
            "documents",
            "max_length",
        ),
        *("messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize"),
        *("sanitize_control_tokens", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Names that transformers gives a chat template, or takes as its own parameters."""
MOST_TEMPLATE_BYTES = 1 << 20
"""Bytes of a template's file: published ones have some thousands, and a device has no end."""


def read_template(file: Path) -> str:
    """The text of a chat template. Raises BadRequest for a file that cannot be read or is no template."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_TEMPLATE_BYTES + 1)
        if len(data) > MOST_TEMPLATE_BYTES:
            raise BadRequest("chat_template", f"{file} has more than {MOST_TEMPLATE_BYTES:,} bytes")
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest("chat_template", f"{file} cannot be read: {error}") from error
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "a"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise BadRequest("chat_template", f"{file} is no template of Jinja: line {error.lineno}: {error}") from error
    except Exception:  # the template refuses this conversation, which lacks what a checkpoint's tokenizer gives
        pass
    return text


def load_tokenizer(folder: Path, template: Path | None = None) -> Any:
    """transformers' tokenizer. Raises BadRequest for a folder without one that can be loaded. template: the file of a
    chat template in place of the folder's own"""
    tokenizer = _tokenizer_of(folder)
    if template is not None:
        tokenizer.chat_template = read_template(template)
    return tokenizer


def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (folder / TOKENIZER_CONFIG).exists() or not (folder / TOKENIZER).exists():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing narrower for an invalid file
        raise BadRequest("checkpoint", f"{folder}: its tokenizer cannot be loaded: {error}") from error


def decoder_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` whose `decode` is the tokenizer's own; None where its class adds something."""
    from transformers import PreTrainedTokenizerFast

    own = [getattr(type(tokenizer), name, None) for name in ("decode", "_decode")]
    plain = own == [PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode]
    return tokenizer.backend_tokenizer if plain else None


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside. Raises BadRequest where the tokenizer is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadRequest("checkpoint", "its tokenizer is in Python; one of the tokenizers library is needed")
    return backend


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens, which stand for no text."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token for token, what in added.items() if what.special) | frozenset(tokenizer.all_special_ids)


def token_bytes_of(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token id that stands for text, for the structures of answers. Raises BadRequest for a tokenizer
    whose ids do not stand for bytes."""
    try:
        backend = backend_of(tokenizer)
        found = token_bytes(json.loads(backend.to_str()), backend.id_to_token)
    except (BadRequest, CheckpointError) as error:
        reason = error.reason if isinstance(error, BadRequest) else str(error)
        raise BadRequest("structure", f"cannot be enforced for this target: {reason}") from error
    special = special_ids(tokenizer)
    return {token: each for token, each in found.items() if token not in special}
