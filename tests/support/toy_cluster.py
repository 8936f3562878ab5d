"""A configuration and loaders for cluster tests: real deployments around the fakes."""

from __future__ import annotations

import contextlib
import os
import threading

from cluster.config import Config
from cluster.engines import load_replica
from cluster.router.ingress import Ingress
from tests.support.edge import ByteTokenizer, Served
from tests.support.fakes import END, VOCABULARY, FakeDrafter, FakeVerifier


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


def toy_ingress(config, peers, sessions, *, priors, tracer=None) -> Ingress:
    served = Served("toy", ToyTokenizer(), VOCABULARY, 2048, frozenset({END}), "float32")
    return Ingress(config, peers, sessions, {"toy": served}, priors, tracer=tracer)


LOADERS = {"drafter": toy_drafter, "verifier": toy_verifier, "ingress": toy_ingress}


def load_until_hung(name, target, states):
    """The verifier of a checkpoint. Its step never returns once a file `hang` is beside the checkpoint's folder; the
    step renames it to `hung` and writes the replica's process id into it, so that no other replica hangs."""
    from verifier_service.engine import VerifierEngine  # loads torch, which no other replica of tests needs

    engine = load_replica(name, target, states)
    assert isinstance(engine, VerifierEngine)
    run, hang = engine.runner.run, target.checkpoint.with_name("hang")

    def run_or_hang(plan):
        with contextlib.suppress(FileNotFoundError):
            hung = hang.rename(hang.with_name("hung"))
            hung.write_text(str(os.getpid()))
            threading.Event().wait()
        return run(plan)

    engine.runner.run = run_or_hang
    return engine
