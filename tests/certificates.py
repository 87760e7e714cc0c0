"""An authority for tests, and certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = datetime.timedelta(days=1)


class Authority:
    """Writes PEM files to a directory.

    Attributes:
        ca: file of its own certificate.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        signed = self._builder(self._name, self._key.public_key()).add_extension(constraint, True)
        self.ca = directory / "ca.pem"
        self._write(self.ca, signed)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate and its key: for ``name``, then for addresses of loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        addresses = (ipaddress.ip_address(f"127.0.0.{last}") for last in range(1, 5))
        names = [x509.DNSName(name), *map(x509.IPAddress, addresses)]
        builder = self._builder(subject, key.public_key())
        cert, file = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        self._write(cert, builder.add_extension(x509.SubjectAlternativeName(names), False))
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert, file

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        signed = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
