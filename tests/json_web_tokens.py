"""A key that signs JSON web tokens, and what verifies them."""

from __future__ import annotations

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwks(**keys: rsa.RSAPrivateKey) -> str:
    """The set of public keys, by their ids."""
    found = []
    for kid, key in keys.items():
        public: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        found.append({**public, "kid": kid, "alg": "RS256", "use": "sig"})
    return json.dumps({"keys": found})


def bearer(token: str) -> dict[str, str]:
    """The header of a call with a token."""
    return {"authorization": f"Bearer {token}"}
