"""Which hosts may be connected to: resolves a name once, and checks every address of it.

Connect to the addresses that the check returned: the name may mean another host afterwards.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection

from cache_protocol.errors import RequestError

Endpoint = tuple[str, int]  # a host as `parse_host` writes it, and a port
# Metadata servers of clouds at addresses that look public.
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16",)))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RefusedAddressError(RequestError):
    """The host may not be connected to; says why, and how to allow it."""


def resolved(host: str, port: int) -> list[str]:
    """The IP addresses of a host, in the order in which to try them.

    Raises:
        OSError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(f"{host} is no name of a host") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Hosts:
    """The hosts that may be connected to. Immutable, thread-safe.

    Args:
        named: that the operator allowed, with any address.
        resolve: gives the IP addresses of a host.
    """

    def __init__(
        self,
        named: Collection[Endpoint] = (),
        resolve: Callable[[str, int], list[str]] = resolved,
    ) -> None:
        self._named = frozenset(named)
        self._resolve = resolve

    def checked(self, host: str, port: int, trusted: Collection[Endpoint] = ()) -> list[str]:
        """The IP addresses of a host to connect to.

        Args:
            host: as `parse_host` writes it.
            trusted: further hosts, which the operator's own settings name.

        Raises:
            RefusedAddressError: an address is not one of the public network.
            OSError: it has no address.
        """
        found = self._resolve(host, port)
        if (host, port) in self._named or (host, port) in trusted:
            return found
        for text in found:
            if reason := _reason(text):
                shown = f"[{host}]" if ":" in host else host
                is_name = text != host
                address = f"its address {text} is {reason}" if is_name else f"it is {reason}"
                raise RefusedAddressError(
                    f"this cache may not connect to {shown}:{port}: {address}. Its operator can "
                    f"allow it with --allow-source, such as --allow-source http://{shown}:{port}/"
                )
        return found


def _reason(text: str) -> str:
    """Why an address is refused; empty for one of the public network."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return next(filter(None, map(_kind, (address, *_inner(address)))), "")


def _kind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if address.is_loopback or address.is_unspecified:
        return "the machine of the node"
    if address.is_link_local or address in _METADATA:
        return "link-local or of a metadata server"
    if address.is_multicast:
        return "multicast"
    if address.is_private or not address.is_global:
        return "of a private network"
    return "reserved" if address.is_reserved else ""


def _inner(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    teredo = address.teredo or ()
    nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
    return [found for found in (address.ipv4_mapped, address.sixtofour, nat64, *teredo) if found]
