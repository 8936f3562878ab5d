"""Certificates of an authority that lives as long as a test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2099, 1, 1)


def name_of(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Writes an authority's certificate, and those that it signs, into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder, self._name = folder, name_of(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.crt"
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        made = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self._write(self.path, made)

    def issue(
        self, file: str, *names: str, begin: datetime.datetime = BEGIN, end: datetime.datetime = END, password: str = ""
    ) -> dict[str, Path]:
        """The files of a certificate with DNS names and IP addresses, as a section of the configuration. password: of
        its key; empty: none"""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address(each)) if each[0].isdigit() else x509.DNSName(each) for each in names]
        )
        certificate, path = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        builder = self._builder(name_of(file), key, begin, end)
        self._write(certificate, builder.add_extension(alternatives, critical=False))
        encrypted: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encrypted = serialization.BestAvailableEncryption(password.encode())
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted
        path.write_bytes(key.private_bytes(*form))
        return {"certificate": certificate, "key": path}

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begin: datetime.datetime = BEGIN,
        end: datetime.datetime = END,
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number(), begin, end)

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
