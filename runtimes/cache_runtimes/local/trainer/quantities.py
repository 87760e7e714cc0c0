"""Kubernetes quantities such as ``500m`` and ``8Gi``, as Go writes them. Pure.

``k8s.io/apimachinery/pkg/api/resource/quantity.go``: a quantity that Go reads and writes again has
the largest suffix that leaves an integer.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Json = dict[str, Any]

PATTERN = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+(\.\d*)?|\.\d+))?"
)
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_EXPONENT = re.compile(r"[eE][+-]?\d+$")


def value_of(quantity: str | int | float) -> Decimal:
    """The number that a quantity means."""
    text = str(quantity)
    if _EXPONENT.search(text):
        return Decimal(text)
    found: Decimal = parse_quantity(text)
    return found


def rounded_up(quantity: str | int | float) -> int:
    """The value as an integer, rounded up, as ``Quantity.Value`` does."""
    return math.ceil(value_of(quantity))


def canonical(quantity: str | int | float) -> str:
    """A quantity as Go writes it: ``0.5`` is ``500m``, ``1024Mi`` is ``1Gi``."""
    return formatted(value_of(quantity), like=quantity)


def formatted(value: Decimal, *, like: str | int | float) -> str:
    """A value in the format of another quantity: binary, decimal, or with an exponent."""
    text = str(like)
    if text.endswith("i") and abs(value) >= 1024 and value == int(value):
        number, step = int(value), 0
        while number % 1024 == 0 and step + 1 < len(_BINARY):
            number, step = number // 1024, step + 1
        return f"{number}{_BINARY[step]}"
    if value == 0:
        return "0"
    power = -9
    scaled = math.ceil(value * 10**9)  # Go rounds up to nano
    while scaled % 1000 == 0 and power < 18:
        scaled, power = scaled // 1000, power + 3
    if _EXPONENT.search(text):
        return f"{scaled}e{power}" if power else str(scaled)
    return f"{scaled}{_DECIMAL[power]}"


def add(total: dict[str, str], requests: Json, times: int = 1) -> None:
    """Adds resources to a total, name by name. The first non-zero quantity gives the format."""
    for name, quantity in requests.items():
        before = total.get(name, "0")
        like = before if value_of(before) else quantity
        total[name] = formatted(value_of(before) + value_of(quantity) * times, like=like)


def raise_to(total: dict[str, str], requests: Json) -> None:
    """Raises each resource of a total to that of ``requests`` where that is larger."""
    for name, quantity in requests.items():
        if name not in total or value_of(quantity) > value_of(total[name]):
            total[name] = canonical(quantity)
