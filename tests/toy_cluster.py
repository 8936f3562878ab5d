"""The real deployments around the fakes: what a cluster test starts."""

from __future__ import annotations

from edge import ByteTokenizer, Served
from fakes import END, VOCABULARY, FakeDrafter, FakeVerifier

from cluster.config import Config
from cluster.ingress import Ingress


class ToyTokenizer(ByteTokenizer):
    """Bytes folded into the toy vocabulary."""

    def encode(self, text: str, begins: bool) -> list[int]:
        return [byte % (VOCABULARY - 1) for byte in text.encode()]

    def decode(self, ids) -> str:
        return "".join(chr(33 + token) for token in ids if token != END)


def toy_config(**sections: object) -> Config:
    share = {"cpu": 0.1}
    return Config.model_validate(
        {
            "targets": {"toy": {"checkpoint": "none", "resources": share, "max_sessions": 64}},
            "drafters": {"helper": {"checkpoint": "none", "resources": share, "max_sessions": 64}},
            "router": {"resources": share},
            **sections,
        }
    )


def toy_drafter(name, model, states) -> FakeDrafter:
    return FakeDrafter(pause_s=0.002)


def toy_verifier(name, model, states) -> FakeVerifier:
    return FakeVerifier(pause_s=0.004)


def toy_ingress(config, places, sessions, *, priors) -> Ingress:
    served = Served("toy", ToyTokenizer(), VOCABULARY, 2048, frozenset({END}), "float32")
    return Ingress(config, places, sessions, {"toy": served}, priors)


LOADERS = {"drafter": toy_drafter, "verifier": toy_verifier, "ingress": toy_ingress}
