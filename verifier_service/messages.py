"""Messages between the workers of a sharded target, as bytes. Nothing that arrives is unpickled.

    4 bytes: length of the head | head, JSON: [name of the class, its fields] | arrays of 64-bit integers, in order

A message is a dataclass. The receiver names the classes that it expects and reads the fields by their annotations: the
head has an array, and a tuple of integers, as its shape, and a dataclass as the list of its fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch

MAX_FRAME_BYTES = 64 << 20
"""The longest message; a plan of 8192 rows has 17 MB."""
HEAD_BYTES = 4
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Message = TypeVar("Message")


class BadFrame(RuntimeError):
    """The received frame is none of the expected messages."""


def receive(stream: Connection, *kinds: type[Message], limit: int = MAX_FRAME_BYTES) -> Message:
    """Receive the next message, of one of these classes. Raises BadFrame; EOFError or OSError if the stream ends."""
    try:
        frame = stream.recv_bytes(limit)
    except OSError as error:
        if not stream.closed and not stream.readable:  # the stream's answer to a frame above its limit
            raise BadFrame(f"a frame of more than {limit} bytes") from error
        raise
    return unpacked(frame, *kinds)


def packed(message: object) -> bytes:
    """Write a message as bytes."""
    arrays: list[bytes] = []
    head = json.dumps([type(message).__name__, _plain(message, arrays)]).encode()
    return b"".join((len(head).to_bytes(HEAD_BYTES, "little"), head, *arrays))


def unpacked(frame: bytes, *kinds: type[Message]) -> Message:
    """Read what `packed` wrote. Raises BadFrame if it is none of these classes."""
    arrays = HEAD_BYTES + int.from_bytes(frame[:HEAD_BYTES], "little")
    try:
        name, values = json.loads(frame[HEAD_BYTES:arrays])
        expected: dict[str, Any] = {kind.__name__: kind for kind in kinds}
        body = _Arrays(frame, arrays)
        message: Message = _reader(expected[name])(values, body)
        if body.start != len(frame):
            raise ValueError(f"{len(frame) - body.start} bytes too many")
        return message
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise BadFrame(f"a frame of {len(frame)} bytes is no {names}: {type(error).__name__}: {error}") from error


def _plain(value: Any, arrays: list[bytes]) -> Any:
    """The form of a field in JSON; arrays are appended to `arrays`."""
    if is_dataclass(value):
        return [_plain(getattr(value, each.name), arrays) for each in fields(value)]
    if isinstance(value, np.ndarray):
        arrays.append(value.astype("<i8", casting="safe").tobytes())
        return value.shape
    if isinstance(value, tuple):
        if value and all(isinstance(each, int) for each in value):  # a long text has thousands of pages
            return _plain(np.array(value, np.int64), arrays)
        return [_plain(each, arrays) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, Path) else value


class _Arrays:
    """The arrays of a frame, from `start` on."""

    def __init__(self, frame: bytes, start: int) -> None:
        self._frame = frame
        self.start = start

    def next(self, shape: Any) -> np.ndarray:
        if type(shape) is not list or not shape or any(type(each) is not int or each < 0 for each in shape):
            raise ValueError(f"{shape!r:.80} for the shape of an array")
        count = math.prod(shape)
        if 8 * count > len(self._frame) - self.start:
            raise ValueError(f"an array of shape {shape!r:.80}, {len(self._frame) - self.start} bytes left")
        found = np.frombuffer(self._frame, "<i8", count, self.start).reshape(shape).astype(np.int64)
        self.start += 8 * count
        return found


Reader = Callable[[Any, _Arrays], Any]
"""Makes a field from its form in JSON. Raises ValueError for anything else."""


@cache
def _reader(kind: Any) -> Reader:
    """Reader of fields with this annotation. Floats have none: only draws have floats, and draws are not sent."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (other,) = (_reader(arg) for arg in args if arg is not type(None))
        return lambda value, arrays: None if value is None else other(value, arrays)
    if origin is np.ndarray:
        return lambda value, arrays: arrays.next(value)
    if kind == tuple[int, ...]:
        return lambda value, arrays: tuple(arrays.next(value).tolist()) if value else ()
    if origin is tuple and args[-1] is Ellipsis:
        return lambda value, arrays: tuple(_reader(args[0])(each, arrays) for each in _plain_value(list, value))
    if origin is tuple or is_dataclass(kind):
        readers = [_reader(each) for each in (args if origin is tuple else get_type_hints(kind).values())]
        made: Callable[..., Any] = (lambda *read: read) if origin is tuple else kind

        def read_all(value: Any, arrays: _Arrays) -> Any:
            pairs = zip(readers, _plain_value(list, value), strict=True)
            return made(*[read(each, arrays) for read, each in pairs])

        return read_all
    if kind is torch.dtype:
        return lambda value, arrays: DTYPES[_plain_value(str, value)]
    if kind is Path:
        return lambda value, arrays: Path(_plain_value(str, value))
    if kind not in (bool, int, str):
        raise ValueError(f"{kind} is not sent")
    return lambda value, arrays: _plain_value(kind, value)


def _plain_value(kind: type, value: Any) -> Any:
    """The value, which must be of exactly this class."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.80} instead of {kind.__name__}")
    return value
