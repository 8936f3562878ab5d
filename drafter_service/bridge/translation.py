"""Translates a growing text from target ids to drafter ids.

The text's bytes are cut into segments at places that depend on the bytes alone, and each segment is encoded alone. So
the drafter's ids are a function of the text: replicas agree on them, and so do the names of saved states. The last
segment is open: it is encoded again with every new token, closed segments never. The open segment's start is a boundary
of both tokenizations, the *sync point*; drafter ids before it no longer change.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dendro.text import Tokens

from drafter_service.bridge.byte_codec import ByteCodec

BOUNDARY = re.compile(rb"[0-9A-Za-z](?=[\t\n\r ])")
"""End of a segment: after a letter or digit that a space follows. Pre-tokenizers split there, and no token of a
SentencePiece vocabulary crosses it, so a text has the same tokens whole and in segments. If a tokenizer gives others,
only guesses are worse."""
LONGEST_SEGMENT = 256
"""Bytes after which a segment without a BOUNDARY ends, between two characters: the most that a new token makes to be
encoded again."""
STEP_TOKENS = 64
"""Target tokens between two kept places. A text that was cut is translated again from the last place before the cut."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the target's text, and the translation up to it."""

    read: int  # target tokens before the place
    closed: int  # drafter tokens in closed segments
    open: bytes  # bytes of the open segment
    begun: bool  # True if the text has any bytes before the place


def closed_segments(data: bytes) -> tuple[list[bytes], bytes]:
    """Split bytes that begin at a segment's start into closed segments and the open one, which may be empty.

    >>> closed_segments(b"one two, three")
    ([b'one'], b' two, three')
    """
    found, start = list[bytes](), 0
    while True:
        match = BOUNDARY.search(data, start, start + LONGEST_SEGMENT + 1)
        if match is not None:
            stop = match.end()
        elif len(data) - start > LONGEST_SEGMENT:
            stop = start + LONGEST_SEGMENT
            while stop > start + LONGEST_SEGMENT - 3 and data[stop] & 0xC0 == 0x80:  # a continuation byte
                stop -= 1
        else:
            return found, data[start:]
        found.append(data[start:stop])
        start = stop


class Translation:
    """Translation of one text. `tokens` are the drafter ids; at least one, as a drafter's text has a root."""

    def __init__(self, target: ByteCodec, drafter: ByteCodec, controls: Mapping[int, int]) -> None:
        """controls: drafter id by target id of each control token that both have; other control tokens are left out"""
        self._target = target
        self._drafter = drafter
        self._controls = controls
        self._place = _Place(0, len(drafter.head), b"", False)
        self._places = [self._place]
        self.tokens = Tokens(drafter.head)
        self.unchanged = 0
        """Number of first drafter ids that have not changed since the caller set `unchanged` to their number."""

    def follow(self, ids: Sequence[int], common: int) -> None:
        """Translate the text `ids`, whose first `common` tokens equal those of the text translated before."""
        if common < self._place.read:
            del self._places[bisect_right([place.read for place in self._places], common) :]
            self._place = self._places[-1]
        place, first, made = self._place, self._place.closed, list[int]()
        while place.read < len(ids):
            part = ids[place.read : place.read + STEP_TOKENS]
            place = self._read(place, part, made)
            if place.read - self._places[-1].read >= STEP_TOKENS:
                self._places.append(place)
        self._place = place
        self._replace(first, made + self._drafter.encode(place.open))

    def _read(self, place: _Place, ids: Sequence[int], made: list[int]) -> _Place:
        """The place after these tokens. Appends the drafter ids of segments that they close to `made`."""
        before, begun, data = len(made), place.begun, place.open
        for number, token in enumerate(ids, place.read):
            found = self._target.bytes_of.get(token)
            if found is not None:
                data += found if begun else self._first(found)
                begun = True
                continue
            self._close(data, made, every=True)
            data = b""
            if token in self._controls and not (number < len(self._target.head) and not begun):
                made.append(self._controls[token])
        data = self._close(data, made, every=False)
        return _Place(place.read + len(ids), place.closed + len(made) - before, data, begun)

    def _first(self, found: bytes) -> bytes:
        """A text's first bytes: without the space that the target's tokenizer puts first, with one if the drafter's
        tokenizer puts one."""
        if self._target.prefixes:
            found = found.removeprefix(b" ")
        return b" " + found if self._drafter.prefixes else found

    def _close(self, data: bytes, made: list[int], every: bool) -> bytes:
        """Append the ids of the closed segments of `data` to `made`, and with `every` those of the open one. Returns
        the bytes that stay open."""
        segments, rest = closed_segments(data)
        for ids in self._drafter.encode_all([*segments, rest] if every else segments):
            made += ids
        return b"" if every else rest

    def _replace(self, first: int, ids: Sequence[int]) -> None:
        """Replace the drafter's ids from `first` on."""
        old = self.tokens.ids
        if not first and not ids:
            ids = (0,)  # any id serves as the root of a text without bytes
        same = 0
        while same < len(ids) and first + same < len(old) and old[first + same] == ids[same]:
            same += 1
        self.tokens.cut(first + same)
        self.tokens.extend(ids[same:])
        self.unchanged = min(self.unchanged, first + same)
