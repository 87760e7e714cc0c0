"""Attestations that rows were forgotten: JSON, signed by a cache with Ed25519, verified offline."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cache_protocol.errors import ConfigError, RequestError, missing_package


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(missing_package(error, "an attestation", "auth")) from None
    return ed25519


def new_key() -> bytes:
    """A private key.

    Raises:
        ConfigError: the package is missing.
    """
    key: bytes = _ed25519().Ed25519PrivateKey.generate().private_bytes_raw()
    return key


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    key = _ed25519().Ed25519PrivateKey.from_private_bytes(private).public_key()
    raw: bytes = key.public_bytes_raw()
    return raw


def sign(content: dict[str, Any], private: bytes) -> str:
    """The attestation of some content."""
    signed = {**content, "public_key": public_key(private).hex()}
    key = _ed25519().Ed25519PrivateKey.from_private_bytes(private)
    signature = base64.b64encode(key.sign(_canonical(signed))).decode()
    return json.dumps({"attestation": signed, "signature": signature}, indent=2)


def digest(attestation: str) -> str:
    """What the next attestation says of this one."""
    return hashlib.sha256(_canonical(json.loads(attestation))).hexdigest()


def verify(text: str, expected_key: str = "") -> dict[str, Any]:
    """The content of an attestation.

    Args:
        expected_key: public key of the cache, in hexadecimal digits; empty: that which it names.

    Raises:
        RequestError: it is no attestation, was changed, or is of another cache.
    """
    try:
        parsed = json.loads(text)
        content, signature = parsed["attestation"], base64.b64decode(parsed["signature"])
        named = bytes.fromhex(content["public_key"])
    except (ValueError, LookupError, TypeError) as error:
        raise RequestError(f"this is no attestation: {error}") from None
    if expected_key and named.hex() != expected_key.strip().lower():
        raise RequestError(f"the attestation has the key {named.hex()}, of another cache")
    from_bytes = _ed25519().Ed25519PublicKey.from_public_bytes
    try:
        from_bytes(named).verify(signature, _canonical(content))
    except Exception as error:  # InvalidSignature, or a key of another length
        kind = type(error).__name__
        raise RequestError(f"the attestation was changed after it was signed ({kind})") from None
    found: dict[str, Any] = content
    return found


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
