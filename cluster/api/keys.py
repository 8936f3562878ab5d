"""API keys: the file that has them, and how one is made. A file has hashes, never a key.

A key is `dendro-ID-SECRET`: the id finds its entry, and the secret has 256 random bits, so one SHA-256 protects it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from dataclasses import fields
from pathlib import Path

from dendro.errors import BadRequest
from pydantic import Field, ValidationError, field_validator, model_validator

from cluster.distinct_keys import RepeatedKey, check_distinct
from cluster.replaced_files import replace_text
from cluster.router.allowance import KeyLimits
from cluster.sections import Section, first_fault

ID_BYTES, SECRET_BYTES = 8, 32
KEY = re.compile(r"dendro-([0-9a-f]{16})-[\w-]{43}", re.ASCII)
MAX_KEYS = 10_000
MAX_FILE_BYTES = 1_000 * MAX_KEYS
MAX_TENANT = 256
"""Characters of a tenant's name."""
MOST = 1 << 40
"""The largest number of a limit."""


class ApiKey(Section):
    """A key as its file has it."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # hash of the key's text
    tenant: str = Field(max_length=MAX_TENANT)
    requests_per_minute: int | None = Field(default=None, ge=1, le=MOST)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=MOST)
    answers: int | None = Field(default=None, ge=1, le=MOST)
    prompt_tokens: int | None = Field(default=None, ge=1, le=MOST)
    new_tokens: int | None = Field(default=None, ge=1, le=MOST)
    structures: bool = True

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, tenant: str) -> str:
        if not tenant.isascii() or not tenant.isprintable():
            raise ValueError("must be printable ASCII")
        return tenant

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(**{field.name: getattr(self, field.name) for field in fields(KeyLimits)})


class ApiKeys(Section):
    """The contents of a file of keys."""

    keys: tuple[ApiKey, ...] = Field(default=(), max_length=MAX_KEYS)

    @model_validator(mode="after")
    def _check(self) -> ApiKeys:
        for field in ("name", "id"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise ValueError(f"keys: two have the {field} {twice!r}")
        return self

    def without(self, name: str) -> ApiKeys:
        """All keys but one. Raises BadRequest where there is none of that name."""
        if all(key.name != name for key in self.keys):
            raise BadRequest("name", f"there is no key {name!r}")
        return ApiKeys(keys=tuple(key for key in self.keys if key.name != name))

    def with_key(self, key: ApiKey) -> ApiKeys:
        """All keys and one more. Raises BadRequest where its name is taken or there are too many."""
        if any(each.name == key.name for each in self.keys):
            raise BadRequest("name", f"there is a key {key.name!r} already; remove it first")
        if len(self.keys) == MAX_KEYS:
            raise BadRequest("file", f"has {MAX_KEYS} keys, the most of one file")
        return ApiKeys(keys=(*self.keys, key))


def new_key(name: str, tenant: str, limits: KeyLimits) -> tuple[str, ApiKey]:
    """A new key's text, which is stored nowhere, and its entry. Raises BadRequest for an invalid field."""
    own = secrets.token_hex(ID_BYTES)
    text = f"dendro-{own}-{secrets.token_urlsafe(SECRET_BYTES)}"
    entry = {"name": name, "id": own, "sha256": digest_of(text), "tenant": tenant, **limits.given()}
    try:
        return text, ApiKey.model_validate(entry)
    except ValidationError as error:
        raise BadRequest(*first_fault(error)) from None


def digest_of(text: str) -> str:
    """The hash under which a key is stored."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_keys(path: Path) -> ApiKeys:
    """The keys of a file. Raises BadRequest naming the file, or the field of a key in it."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadRequest("auth.keys", f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest("auth.keys", f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        check_distinct(data.decode(errors="replace"))
        return ApiKeys.model_validate_json(data)
    except RepeatedKey as error:
        raise BadRequest("auth.keys", f"{path}: {error}") from None
    except ValidationError as error:
        field, reason = first_fault(error)
        raise BadRequest("auth.keys", f"{path}: {field + ': ' if field else ''}{reason}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_keys(path: Path, keys: ApiKeys) -> None:
    """Replace a file at once, readable by its owner alone: a router that reads it meanwhile gets the old or the new.
    Raises BadRequest where the folder cannot be written."""
    replace_text("auth.keys", path, keys.model_dump_json(indent=1, exclude_none=True) + "\n", mode=0o600)
