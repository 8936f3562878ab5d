"""TLS from files that may be replaced while a process runs: for gRPC's servers and channels, and for an HTTP server.

Peers are known by their role. A drafter's certificate has the DNS name `drafter.dendro`, whatever its address; so do
`verifier.dendro` and `router.dendro`.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from dendro.errors import BadRequest

log = logging.getLogger("dendro.certificates")

ROLES = ("router", "drafter", "verifier")
NAMES = "x509_subject_alternative_name"
"""Key of a peer's names in gRPC's authentication context."""


def role_name(role: str) -> str:
    """The DNS name in the certificates of a role."""
    return f"{role}.dendro"


def has_role(context: Mapping[str, Sequence[bytes]], role: str) -> bool:
    """True if the peer of a call, whose certificate gRPC has checked, has a role. context: the call's
    authentication context"""
    return role_name(role).encode() in context.get(NAMES, ())


def role_options(role: str) -> tuple[tuple[str, str], ...]:
    """Options of a channel to a peer of a role, whose certificate has the role's name in place of its address."""
    return (("grpc.ssl_target_name_override", role_name(role)), ("grpc.default_authority", role_name(role)))


@dataclass(frozen=True, slots=True)
class _Contents:
    """The files' contents, which fit together."""

    certificate: bytes
    key: bytes
    authority: bytes | None

    @property
    def for_server(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)


class CertificateFiles:
    """A certificate, its key, and the authority of the other side's certificates. Read again when one changes; files
    that do not fit together, as while they are being replaced, are not used. Thread-safe."""

    def __init__(self, field: str, certificate: Path, key: Path, authority: Path | None = None) -> None:
        """certificate: file with the chain, in PEM   authority: signs clients' certificates, which are then required,
        or servers'. Raises BadRequest, naming `field`, for files that cannot be used."""
        self._field = field
        self._certificate, self._key, self._authority = certificate, key, authority
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._contents = self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. The files are read again for a new connection if they have changed."""

        def changed() -> grpc.ServerCertificateConfiguration | None:
            return self._contents.for_server if self.refresh() else None

        required = self._authority is not None
        return grpc.dynamic_ssl_server_credentials(
            self._contents.for_server,
            changed,  # type: ignore[arg-type]  # the stubs lack that None means unchanged
            required,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a new gRPC channel, which shows the certificate to the server."""
        self.refresh()
        held = self._contents
        return grpc.ssl_channel_credentials(held.authority, held.key, held.certificate)

    def ssl_context(self) -> ssl.SSLContext:
        """The context of another server's socket. New connections use new files."""
        current = [self._context()]

        def chosen(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            if self.refresh():
                current[0] = self._context()
            connection.context = current[0]

        outer = self._context()
        outer.sni_callback = chosen  # called for clients that name no server, too
        return outer

    def refresh(self) -> bool:
        """Read the files if they have changed. True if they have and fit together."""
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            try:
                self._contents = self._read()
            except BadRequest as error:
                log.error("the last certificate stays: %s", error)
                return False
            log.info("%s: the certificate was read again", self._field)
            return True

    @property
    def _paths(self) -> list[Path]:
        return [each for each in (self._certificate, self._key, self._authority) if each is not None]

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        """A value that changes when a file changes; None if there is no file."""
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found

    def _read(self) -> _Contents:
        for path in self._paths:
            if not path.is_file():
                raise BadRequest(self._field, f"there is no file {path}")
        try:
            self._context()  # checks that they fit together
            authority = self._authority.read_bytes() if self._authority is not None else None
            return _Contents(self._certificate.read_bytes(), self._key.read_bytes(), authority)
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(self._field, f"{self._certificate} cannot be used: {error}") from None

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._certificate, self._key, password="")  # else an encrypted key is asked for one
        if self._authority is not None:
            context.load_verify_locations(self._authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
