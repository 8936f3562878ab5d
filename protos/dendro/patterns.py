r"""Regular expressions of JSON schemas, as expressions of Rust's regex crate, which llguidance compiles.

JSON Schema has the syntax of ECMA-262. What the two write alike and mean otherwise is translated: `.`, `\s`, classes in
classes, and inline flags, which ECMA-262 does not have. llguidance reads an escaped quote or backslash as part of any
class that has all control characters, also of one that it makes of alternatives; so no translated class has control
characters but tab, newline and return, and no pattern names all. The translation matches no string that the pattern
does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection

SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
WRITTEN = r"[\t\n\r\x20-\u{10ffff}]"
"""A character other than the control characters, which are hardly ever meant."""
CLASSES = {
    ".": rf"[[^\n\r\u2028\u2029]&&{WRITTEN}]",
    r"\s": f"[{SPACES}]",
    r"\S": rf"[[^{SPACES}\ufeff\x85]&&{WRITTEN}]",
    r"\D": rf"[\D&&{WRITTEN}]",
    r"\W": rf"[\W&&{WRITTEN}]",
}
NAMES_OF_CLASSES = "dDwWsSpP"
OTHER_ESCAPES = "bBuk123456789"
"""Letters and digits after a backslash that both syntaxes have, or that Rust's refuses."""
CODE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|u\{(?P<long>[0-9A-Fa-f]{1,6})\}|c(?P<control>[A-Za-z])"
    r"|(?P<name>[tnvfr]|0(?!\d)))"
)
"""Escapes that stand for one character."""
NAMED = dict(zip("0tnvfr", "\0\t\n\v\f\r", strict=True))
CONTROLS = frozenset(map(chr, range(32)))
DOUBLED = ("&&", "--", "~~")
"""Operators in Rust's classes; in ECMA-262's, two characters."""

SLASHED = {"/": r"\/", "\\\n": r"\n"}
"""Characters that cannot stand between slashes, with the spelling that can."""

KEY = r'[^"\\\x00-\x1f]'
"""A character of a key that JSON can write without an escape."""

MOST_PLACES = 500
"""Places in the common beginnings of keys that an expression of other keys distinguishes: llguidance takes 0.03 s for
so many, and 0.3 s for 2,400."""


def translated(pattern: str) -> str:
    """Translate a pattern to Rust's syntax. Raises ValueError, with the reason, if it has no such form."""
    out: list[str] = []
    controls = set("\t\n\v\f\r")  # control characters that the pattern names outside of classes, or may name by \s
    place = depth = 0
    while place < len(pattern):
        here = pattern[place]
        if code := CODE.match(pattern, place):
            character = _character(code)
            controls |= set() if depth else {character}
            part, place = f"\\u{{{ord(character):x}}}", code.end()
        elif here == "\\":
            part, place = _escape(pattern, place, depth)
        elif depth:
            part, place, depth = _in_class(pattern, place, depth)
        elif pattern.startswith("[^]", place):
            part, place = WRITTEN, place + 3
        elif here == "[":
            negated = pattern.startswith("[^", place)
            part, place, depth = "[[^" if negated else "[[", place + 1 + negated, 1
            if pattern.startswith("]", place):
                raise ValueError("has [], which no character is of")
        elif pattern.startswith("(?", place) and not re.match(r"\(\?(:|=|!|<[=!]|<[A-Za-z_]\w*>)", pattern[place:]):
            raise ValueError(f"has {pattern[place : place + 4]!r}: JSON Schema's expressions have no inline flags")
        else:
            controls |= {here} & CONTROLS
            part, place = CLASSES[here] if here == "." else here, place + 1
        out.append(part)
    if depth:
        raise ValueError("has a [ without its ]")
    if controls >= CONTROLS:
        raise ValueError("names all control characters: an escaped quote would match it, too")
    return "".join(out)


def _character(code: re.Match[str]) -> str:
    """The character of an escape."""
    if code["high"]:
        return chr(0x10000 + (int(code["high"], 16) - 0xD800) * 0x400 + int(code["low"], 16) - 0xDC00)
    if code["control"]:
        return chr(ord(code["control"]) % 32)
    if code["name"]:
        return NAMED[code["name"]]
    number = int(code["x"] or code["u"] or code["long"], 16)
    if 0xD800 <= number < 0xE000:
        raise ValueError(f"has {code.group()}: half of a surrogate pair is no character")
    if number > 0x10FFFF:
        raise ValueError(f"has {code.group()}, which is no character")
    return chr(number)


def _escape(pattern: str, place: int, depth: int) -> tuple[str, int]:
    """The translation of an escape that stands for more than a character, or for itself, and the place after it."""
    if place + 1 == len(pattern):
        raise ValueError("ends with a lone backslash")
    after = pattern[place + 1]
    if after in "pP" and (name := re.match(r"\\[pP]\{[^}]*\}", pattern[place:])):
        found = name.group()
        return rf"[{found}&&{WRITTEN}]", place + len(found)
    if f"\\{after}" in CLASSES:
        return CLASSES[f"\\{after}"], place + 2
    if after == "b" and depth:  # a backspace
        return r"\u{8}", place + 2
    if after.isalnum() and after not in NAMES_OF_CLASSES + OTHER_ESCAPES:
        raise ValueError(f"has \\{after}, which is no escape of ECMA-262")
    if after in "<>" or not after.isascii():  # Rust's escapes of these are edges of words
        return after, place + 2
    return f"\\{after}", place + 2


def _in_class(pattern: str, place: int, depth: int) -> tuple[str, int, int]:
    """The translation of a character of a class, the place after it, and the depth there."""
    here = pattern[place]
    if here == "]":
        return f"]&&{WRITTEN}]", place + 1, 0
    if here == "[":
        return "\\[", place + 1, depth
    if pattern[place : place + 2] in DOUBLED:
        return f"{here}\\{here}", place + 2, depth
    return here, place + 1, depth


def slashed(pattern: str) -> str:
    """Spell an expression in Rust's syntax so that it can stand between the slashes of a Lark grammar. Raises
    ValueError if that is impossible."""
    if len(pattern) - len(pattern.rstrip("\\")) & 1:
        raise ValueError("ends with a lone backslash")
    return re.sub(r"\\.|/", lambda found: SLASHED.get(found.group(), found.group()), pattern, flags=re.DOTALL)


def other_keys(names: set[str], beginnings: Collection[str] = ()) -> str:
    """An expression of the keys that JSON writes without an escape, but for these and those with these beginnings,
    which are written so too. Where they are long, only as many of their first characters are read as keep it short."""
    written = {name for name in names if re.fullmatch(r'[^"\\\x00-\x1f]*', name)}
    if not written and not beginnings:
        return f"^{KEY}*$"
    deepest, places, longest = 0, 0, max(map(len, (*written, *beginnings)))
    while deepest < longest:
        places += len({each[: deepest + 1] for each in (*written, *beginnings) if len(each) > deepest})
        if deepest and places > MOST_PLACES:
            break
        deepest += 1
    cut = {each[:deepest] for each in (*beginnings, *(name for name in written if len(name) > deepest))}
    return f"^(?:{_others(sorted(each for each in written if len(each) <= deepest), sorted(cut))})$"


def _others(names: list[str], beginnings: list[str]) -> str:
    """Texts of KEY's characters that are none of these: by a walk down their common beginnings."""
    starts = sorted({each[0] for each in (*names, *beginnings) if each})
    differ = "".join(_literal(each) for each in starts)
    parts = [f"{KEY[:-1]}{differ}]{KEY}*"]
    if "" not in names:
        parts.append("")
    for start in starts:
        if start not in beginnings:
            rest = [[each[1:] for each in listed if each.startswith(start)] for listed in (names, beginnings)]
            parts.append(f"{_literal(start)}(?:{_others(*rest)})")
    return "|".join(parts)


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"


_DAYS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = rf"(?:{_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:X|YX|YYX|Y(?:YX|X-)Y{0,58}X)?".replace("X", "[A-Za-z0-9]").replace("Y", "[A-Za-z0-9-]")
"""Label of a host name, without -- in the third and fourth places, as in xn--: Punycode would have to follow."""
FORMATS = {
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Formats as expressions. Those of RFC 3339: days that exist, and seconds below 60."""
LONGEST = {"hostname": 253}
"""The most characters of formats that have an end."""
