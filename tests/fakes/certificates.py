"""Certificates and keys made on the spot: each its own authority, for 127.0.0.1 or a name."""

import dataclasses
import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = dt.timedelta(days=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Put both into a folder; where they are."""
        certificate, key = folder / "tls.crt", folder / "tls.key"
        certificate.write_bytes(self.certificate)
        key.write_bytes(self.key)
        return certificate, key


def identity(name: str, host: str = "") -> Identity:
    """A new key, and a certificate for it that it signed itself; it holds ``host``, or else 127.0.0.1."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    holder = x509.DNSName(host) if host else x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY)
        .add_extension(x509.SubjectAlternativeName([holder]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    signed = builder.sign(key, hashes.SHA256())
    plain, pem = serialization.NoEncryption(), serialization.Encoding.PEM
    return Identity(signed.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
