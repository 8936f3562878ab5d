"""Decides whether a drafter fits a target: by the texts of their token ids, never by sizes or bytes of files.

Never compared: configured vocabularies, merges, normalisers, pre-tokenisers, decoders, chat templates and the drafter's
end ids. Only the target's tokenizer processes text, and verification compares ids exactly: an id with another text in
the drafter costs acceptance and changes no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tree_layers.checkpoint import Facts
from tree_layers.token_bytes import NO_FORM
from tree_layers.tokens import TokenTable

from cluster.config import BridgeChoice

ONE_IN = 100
"""A drafter is refused where more than one text in ONE_IN differs. Tokenizers of one family differ in no token or one,
those of two families in thousands."""
SHOWN = 3
BridgeName = Literal["string", "intersection"]
DEFAULT_BRIDGE: BridgeName = "string"
"""What runs where the tokenizers differ and the configuration names no bridge (docs/bridge.md)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id with two texts."""

    token: int
    target: str
    drafter: str

    def __str__(self) -> str:
        return f"{self.token} is {self.target!r} to the target and {self.drafter!r} to the drafter"


@dataclass(frozen=True, slots=True)
class TokenFit:
    """How a drafter's tokens compare with a target's."""

    refusal: str  # why the drafter cannot draft for the target; empty: it can
    warning: str = ""  # differences that cost acceptance
    note: str = ""  # number of tokens that it guesses, and differences without a cost: added tokens, longer tails
    shared: int = 0  # ordinary ids that both have
    different: int = 0  # shared ids whose texts differ
    first: tuple[Difference, ...] = ()  # the first SHOWN differences

    @property
    def fits(self) -> bool:
        return not self.refusal


def fit_of(target: Facts, drafter: Facts) -> TokenFit:
    """Compare the token tables of a target, which must have one, and of a drafter."""
    assert target.tokens is not None, "a target is not served without a tokenizer"
    if drafter.tokens is None:
        return _without_tokenizer(target, drafter)
    ours, theirs = target.tokens, drafter.tokens
    ordinary = sorted((ours.texts.keys() & theirs.texts.keys()) - ours.added - theirs.added)
    unlike = [token for token in ordinary if ours.texts[token] != theirs.texts[token]]
    first = tuple(Difference(token, ours.texts[token], theirs.texts[token]) for token in unlike[:SHOWN])
    counted = f"{len(unlike)} of {len(ordinary)} ordinary tokens mean something else"
    if first:
        counted += f": {'; '.join(map(str, first))}"
    refusal = warning = ""
    if not ordinary:
        refusal = "the two tokenizers have no ordinary token id in common"
    elif ONE_IN * len(unlike) > len(ordinary):
        refusal = (
            f"{counted}. Without a bridge it can draft only for targets with its own tokenizer; name them in `targets`"
        )
    elif unlike:
        warning = f"{counted}; drafts with them are not accepted"
    note = ", ".join(
        part for part in ("" if drafter.draft is None else str(drafter.draft), _note(ours, theirs)) if part
    )
    return TokenFit(refusal, warning, note, len(ordinary), len(unlike), first)


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a drafter serves a target: as they are, through a bridge, or not at all."""

    fit: TokenFit
    bridge: BridgeName | None
    refusal: str  # why it cannot draft for the target; empty: it can
    why: str  # why there is a bridge; empty without one


def pairing_of(target: Facts, drafter: Facts, bridge: BridgeChoice) -> Pairing:
    """How a drafter whose configuration has this `bridge` serves a target."""
    fit = fit_of(target, drafter)
    if bridge == "none" or (bridge == "auto" and fit.fits):
        return Pairing(fit, None, fit.refusal, "")
    for side, facts in (("drafter", drafter), ("target", target)):
        if facts.tokens is None or not facts.tokens.form:
            missing = "it has no tokenizer" if facts.tokens is None else NO_FORM
            reason = f"no bridge can be made for the {side}: {missing}"
            return Pairing(fit, None, f"{fit.refusal}; {reason}" if fit.refusal else reason, "")
    kind = DEFAULT_BRIDGE if bridge == "auto" else bridge
    why = f"the configuration names {kind}"
    if fit.refusal:
        why = f"the tokenizers differ: {fit.different} of {fit.shared} ordinary ids have another text"
    if drafter.draft is not None:
        why += f"; it {drafter.draft}"
    return Pairing(fit, kind, "", why)


def _without_tokenizer(target: Facts, drafter: Facts) -> TokenFit:
    """Compare numbers of tokens with a drafter without a tokenizer: state-spaces publishes none."""
    assert target.tokens is not None
    if drafter.unpadded == target.tokens.size:
        return TokenFit("", note=f"has no tokenizer; its {drafter.unpadded} tokens are taken to be the target's")
    return TokenFit(
        f"has no tokenizer, and {drafter.unpadded} tokens where the target has {target.tokens.size}; "
        "name the folder of its tokenizer in `tokenizer`"
    )


def _note(ours: TokenTable, theirs: TokenTable) -> str:
    """The number of added tokens that differ, and of ids that only one side has."""
    both = ours.texts.keys() & theirs.texts.keys()
    added = sum(ours.texts[token] != theirs.texts[token] for token in both & (ours.added | theirs.added))
    alone = len(ours.texts) - len(both), len(theirs.texts) - len(both)
    parts = [f"{added} added tokens differ"] if added else []
    sides = zip(("target", "drafter"), alone, strict=True)
    parts += [f"the {side} alone has {count} ids" for side, count in sides if count]
    return ", ".join(parts)
