"""Training data: texts, JSON lines and conversations as one stream of a target's tokens, with a held-out part."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from dendro.errors import BadRequest

from cluster.json_lines import json_lines, reading
from cluster.router.tokenizer import CheckpointTokenizer
from drafter_service.training.rows import token_dtype
from drafter_service.training.saving import NotSaved, replacing

JSON_LINES = (".jsonl", ".ndjson")
MESSAGES = "messages"
PIECE_CHARACTERS = 1 << 20
"""A text file is tokenized in pieces of about this size, cut at the ends of lines."""
HELD_OUT_EVERY = 20
"""Every so many documents one is held out, as long as these have fewer than HELD_OUT_MOST tokens."""
HELD_OUT_MOST = 100_000
HELD_OUT_SHARE = 0.05
"""Least share of the tokens that is held out. Where whole documents give less, the end of the stream is held out."""
SAVE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a piece of one; or a conversation."""

    where: str  # the file; of a JSON line `file:line`
    text: str
    messages: tuple[dict[str, Any], ...] = ()
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class DataSource:
    """The files to train on. A folder stands for the files below it whose names match `pattern`, hidden ones left out.

    `.jsonl` and `.ndjson` have a JSON object a line: with `messages`, a conversation; else its `field` is a text. All
    other files are UTF-8 texts.
    """

    paths: tuple[Path, ...]
    pattern: str = "*"
    field: str = "text"

    def files(self) -> list[Path]:
        """Raises BadRequest for a path that is missing and for a folder without files."""
        found: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                below = [each.relative_to(path) for each in path.rglob(self.pattern) if each.is_file()]
                visible = sorted(each for each in below if not any(part.startswith(".") for part in each.parts))
                if not visible:
                    raise BadRequest("--data", f"{path} has no file that matches {self.pattern!r}")
                found += [path / each for each in visible]
            elif path.is_file():
                found.append(path)
            else:
                raise BadRequest("--data", f"there is no file or folder {path}")
        if not found:
            raise BadRequest("--data", "name at least one file or folder")
        return found

    def documents(self) -> Iterator[Document]:
        """Raises BadRequest, naming file and line, for what cannot be read."""
        for file in self.files():
            if file.suffix in JSON_LINES:
                for number, entry in json_lines("--data", file, "documents"):
                    yield _document(f"{file}:{number}", entry, self.field)
            else:
                yield from _pieces(file)


def _pieces(file: Path) -> Iterator[Document]:
    """A text file's pieces. Raises BadRequest for an empty one."""
    with reading("--data", file), file.open(encoding="utf-8") as stream:
        piece = "".join(stream.readlines(PIECE_CHARACTERS))
        if not piece.strip():
            raise BadRequest("--data", f"{file} is empty")
        begins = True
        while piece:
            following = "".join(stream.readlines(PIECE_CHARACTERS))
            yield Document(str(file), piece, begins=begins, ends=not following)
            begins, piece = False, following


def _document(where: str, entry: Mapping[str, Any], field: str) -> Document:
    messages = entry.get(MESSAGES)
    if messages is not None and field not in entry:
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise BadRequest("--data", f"{where}: {MESSAGES} must be a list of objects with a role and a content")
        return Document(where, "", tuple(messages))
    text = entry.get(field)
    if not isinstance(text, str) or not text:
        there = "has no" if field not in entry else "has no text in"
        raise BadRequest("--data", f"{where} {there} field {field!r}; its fields are {', '.join(entry) or 'none'}")
    return Document(where, text)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A part of the data: a stream of tokens, mapped from the disk."""

    tokens: np.ndarray  # [tokens] of token_dtype
    answers: np.ndarray  # [answers] int64, positions where answers of conversations begin


@dataclass(slots=True)
class Written:
    """Progress of tokenizing, from which a resumed run continues."""

    documents: int = 0  # documents in all; each piece of a text counts
    characters: int = 0
    train: int = 0  # tokens
    held_out: int = 0
    train_answers: int = 0
    held_out_answers: int = 0
    train_prompts: int = 0  # prompts of conversations that the target answers
    train_prompt_tokens: int = 0
    held_out_prompts: int = 0
    held_out_prompt_tokens: int = 0


PARTS = ("train", "held_out")


class DataFolder:
    """The tokens of the data on disk: `train.tokens`, `held_out.tokens`, and int64 positions of answers; and
    the prompts of either part's conversations, `train.prompts` and so on, with the int64 positions where each ends."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        self.dtype = np.dtype(token_dtype(vocabulary))
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, part: str) -> TokenStream:
        """`train` or `held_out`."""
        return TokenStream(
            self._mapped(f"{part}.tokens", self.dtype), self._mapped(f"{part}.answers", np.dtype(np.int64))
        )

    def prompts(self, part: str) -> list[np.ndarray]:
        """Prompts of a part's conversations, each without the last answer."""
        tokens = self._mapped(f"{part}.prompts", self.dtype)
        ends = self._mapped(f"{part}.prompt_ends", np.dtype(np.int64))
        return np.split(tokens, ends[:-1]) if len(ends) else []

    def write(
        self,
        source: DataSource,
        tokenizer: CheckpointTokenizer,
        end_id: int | None,
        least: int,
        on_documents: Callable[[Written], None],
    ) -> Written:
        """Tokenize the data, or what an interrupted run has left of it.

        end_id: appended to every text; conversations end as their template says   least: tokens of the held-out part
        Raises BadRequest, naming the file and line, for bad data; NotSaved on a full disk.
        """
        written = self._begun()
        saved = time.monotonic()
        try:
            self._cut(written)
            for document in islice(source.documents(), written.documents, None):
                self._append(written, document, tokenizer, end_id)
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self._save(written)
                    on_documents(written)
                    saved = time.monotonic()
            self._hold_out(written, least)
        except OSError as error:
            reason = f"{self.folder} cannot be written: {error.strerror}. Run the same command again to resume"
            raise NotSaved(reason) from error
        return written

    def _append(self, written: Written, document: Document, tokenizer: CheckpointTokenizer, end_id: int | None) -> None:
        ids, answer, prompt = _encode(document, tokenizer)
        if document.ends and not document.messages and end_id is not None:
            ids.append(end_id)
        if ids and max(ids) >= self.vocabulary:
            raise BadRequest("--data", f"{document.where} has the token {max(ids)}; the target has {self.vocabulary}")
        held = written.documents % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and written.held_out < HELD_OUT_MOST
        part = "held_out" if held else "train"
        if answer is not None:
            position = np.array([getattr(written, part) + answer], np.int64)
            self._add(written, f"{part}_answers", f"{part}.answers", position)
        self._add(written, part, f"{part}.tokens", np.array(ids, self.dtype))
        if prompt:
            self._add(written, f"{part}_prompt_tokens", f"{part}.prompts", np.array(prompt, self.dtype))
            end = np.array([getattr(written, f"{part}_prompt_tokens")], np.int64)
            self._add(written, f"{part}_prompts", f"{part}.prompt_ends", end)
        written.documents += 1
        written.characters += len(document.text)

    def _add(self, written: Written, counter: str, file: str, values: np.ndarray) -> None:
        with (self.folder / file).open("ab") as stream:
            stream.write(values.tobytes())
        setattr(written, counter, getattr(written, counter) + len(values))

    def _hold_out(self, written: Written, least: int) -> None:
        """Move the end of the training part to the held-out one where that is too small. May be repeated."""
        wanted = max(least, int(HELD_OUT_SHARE * (written.train + written.held_out)))
        if written.held_out >= min(wanted, HELD_OUT_MOST) or written.train <= wanted:
            return
        kept = written.train - (wanted - written.held_out)
        self._add(written, "held_out", "held_out.tokens", np.array(self.read("train").tokens[kept:]))
        written.train = kept
        written.train_answers = int((self.read("train").answers < kept).sum())
        self._save(written)
        self._cut(written)

    def _begun(self) -> Written:
        file = self.folder / "written.json"
        return Written(**json.loads(file.read_text())) if file.exists() else Written()

    def _save(self, written: Written) -> None:
        with replacing(self.folder / "written.json") as partial:
            partial.write_text(json.dumps(asdict(written)))

    def _cut(self, written: Written) -> None:
        """Cut all files to the lengths that were saved: a kill may have left them longer."""
        tokens = self.dtype.itemsize
        for part in PARTS:
            for file, counter, size in (
                (f"{part}.tokens", part, tokens),
                (f"{part}.answers", f"{part}_answers", 8),
                (f"{part}.prompts", f"{part}_prompt_tokens", tokens),
                (f"{part}.prompt_ends", f"{part}_prompts", 8),
            ):
                with (self.folder / file).open("ab") as stream:
                    stream.truncate(getattr(written, counter) * size)

    def _mapped(self, file: str, dtype: np.dtype[Any]) -> np.ndarray:
        path = self.folder / file
        if not path.stat().st_size:
            return np.empty(0, dtype)  # an empty file cannot be mapped
        return np.memmap(path, dtype, mode="r")


def _encode(document: Document, tokenizer: CheckpointTokenizer) -> tuple[list[int], int | None, list[int]]:
    """A document's tokens, where in them the last answer of a conversation begins, and the prompt of that answer: of a
    conversation that ends with a question, the whole of it."""
    if not document.messages:
        return tokenizer.encode(document.text, document.begins), None, []
    messages = document.messages
    try:
        whole = tokenizer.chat(messages, opens_answer=False)
        answered = messages[-1]["role"] == "assistant" and len(messages) > 1
        prompt = tokenizer.chat(messages[:-1] if answered else messages, opens_answer=True)
    except BadRequest as error:
        raise BadRequest("--data", f"{document.where} has {MESSAGES}, and {error.reason}") from error
    given = tokenizer.encode_chat(prompt)
    if not answered or not whole.startswith(prompt):
        return tokenizer.encode_chat(whole), None, given
    return given + tokenizer.encode(whole[len(prompt) :], False), len(given), given


def held_out_prompts(held_out: TokenStream, count: int, tokens: int) -> np.ndarray:
    """Take up to `count` prompts of the held-out part, [prompts, tokens] int64: text before answers of conversations,
    else text at evenly spread places."""
    ends: Sequence[int] = held_out.answers[held_out.answers >= tokens][:count].tolist()
    if not ends:
        places = min(count, len(held_out.tokens) // tokens)
        apart = len(held_out.tokens) // max(places, 1)
        ends = [place * apart + tokens for place in range(places)]
    prompts = [held_out.tokens[end - tokens : end] for end in ends]
    return np.stack(prompts).astype(np.int64) if prompts else np.empty((0, tokens), np.int64)
