"""The demo pair's text: the standard library of the running Python, and the tokenizer made from it.

Every Python installation has this corpus, so the demo pair can be trained without a download. A fixed list of modules
is held out of the training text and of the tokenizer; `held_out.json` has passages of them.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first

# Single-file modules that exist, under the same name, in Python 3.11 and 3.12.
HELD_OUT = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "colorsys.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "difflib.py",
    "fnmatch.py",
    "fractions.py",
    "functools.py",
    "getopt.py",
    "graphlib.py",
    "gzip.py",
    "heapq.py",
    "json/encoder.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
    "timeit.py",
)

# No ordinary library code: installed packages, files that do not parse on purpose, and tables of characters.
SKIPPED_FOLDERS = ("site-packages/", "dist-packages/", "lib2to3/tests/data/", "test/encoded_modules/", "encodings/")
SKIPPED_PREFIXES = ("test/bad", "test/test_lib2to3/data/", "test/tokenizedata/")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One document of the corpus."""

    name: str  # relative to the standard library, with forward slashes
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """Facts of the pair's training text, for the model card."""

    python: str
    files: int
    bytes: int
    tokens: int
    digest: str  # sha256 over the sorted lines "name sha256-of-file"


def library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _is_corpus_name(name: str) -> bool:
    return not name.startswith(SKIPPED_FOLDERS + SKIPPED_PREFIXES)


def _read_source(path: Path) -> str | None:
    """The file's text with Unix line ends, or None if its bytes are invalid in its declared encoding."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def source_files(root: Path | None = None) -> Iterator[SourceFile]:
    """Every readable module of the standard library in order of name, held-out ones included."""
    root = root or library_root()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if _is_corpus_name(name):
            text = _read_source(path)
            if text:
                yield SourceFile(name, text)


def training_files(root: Path | None = None) -> list[SourceFile]:
    return [source for source in source_files(root) if source.name not in HELD_OUT]


def train_tokenizer(files: list[SourceFile], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of so many tokens: any text encodes, and decodes to the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in files), trainer)
    return tokenizer


def encode_corpus(files: list[SourceFile], tokenizer: Tokenizer, seed: int) -> np.ndarray:
    """All documents in an order drawn from `seed`, each followed by the end-of-text token: [tokens] uint16."""
    order = np.random.default_rng(seed).permutation(len(files))
    end = np.array([END_OF_TEXT_ID], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch([files[index].text for index in order]):
        pieces += [np.array(encoding.ids, dtype=np.uint16), end]
    return np.concatenate(pieces)


def corpus_facts(files: list[SourceFile], tokens: int) -> CorpusFacts:
    listing = "\n".join(f"{source.name} {source.digest}" for source in sorted(files, key=lambda source: source.name))
    return CorpusFacts(
        python=platform.python_version(),
        files=len(files),
        bytes=sum(len(source.text.encode()) for source in files),
        tokens=tokens,
        digest=hashlib.sha256(listing.encode()).hexdigest(),
    )
