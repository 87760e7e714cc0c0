"""One strict parser of each address that a caller names. Pure.

Libraries read odd spellings of an address in different ways. So each address is taken apart here
once, refused unless it has the one spelling that this module would write, and handed on as the
text that `Address` and `Source` rebuild.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

from cache_protocol.errors import RequestError

HTTP = ("http", "https")
DEFAULT_PORTS = {"http": 80, "https": 443}
# The schemes of a source, and the kind of store that each one means.
KINDS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "az"),
    **dict.fromkeys(HTTP, "http"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# RFC 3986, without the characters that end a host or a path in some library.
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_USER = re.compile(r"([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")  # a host that ends so is an IPv4 address
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}|arn:[A-Za-z0-9:._-]{1,250}")
_CONTAINER = re.compile(r"[A-Za-z0-9$][A-Za-z0-9$_-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_MAX_HOST = 253
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Address:
    """An address of a server; its text is its one spelling.

    Attributes:
        scheme: in lower case.
        host: a name in lower case, or an IP address as `ipaddress` writes it, without brackets.
        port: None if the address has none.
        path: empty, or with a slash in front.
        user: as it is escaped in the address; empty without one. Never a password.
    """

    scheme: str
    host: str
    port: int | None = None
    path: str = ""
    user: str = ""

    @property
    def used_port(self) -> int:
        """The port, or that of the scheme; 0 if neither is known."""
        return self.port or DEFAULT_PORTS.get(self.scheme, 0)

    @property
    def authority(self) -> str:
        """``host`` or ``host:port``, with the brackets of IPv6."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{self.authority}{self.path}"


@dataclass(frozen=True)
class Source:
    """The parts of the URI of an object store.

    Attributes:
        scheme: in lower case.
        authority: between ``//`` and the next slash: a bucket, a container with or without the
            host of its account, or the address of an HTTP server.
        key: behind that slash, as it was given.
        address: of the server that the URI itself names; None if it names a bucket only.
    """

    scheme: str
    authority: str
    key: str
    address: Address | None = None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}/{self.key}"


def parse_address(
    what: str,
    text: str,
    schemes: Collection[str] = HTTP,
    *,
    may_have_user: bool = False,
    may_have_password: bool = False,
) -> Address:
    """The parts of an address such as ``https://store.example:9000/path``.

    Args:
        what: names the address in errors, such as ``the option 'endpoint'``.
        text: as the caller gave it.
        schemes: that it may have, in lower case.
        may_have_user: accepts ``user@`` before the host, without a password.
        may_have_password: accepts ``user:password@``: an operator's own setting, never a caller's.

    Raises:
        RequestError: names ``what`` and the reason.
    """
    found = _SCHEME.match(text)
    if found is None or found[1].lower() not in schemes:
        example = " or ".join(f"{scheme}://HOST[:PORT]" for scheme in schemes)
        raise _refused(what, text, f"it must be written {example}")
    authority, slash, rest = text[found.end() :].partition("/")
    user, at, place = authority.rpartition("@")
    if at and not (may_have_user or may_have_password):
        raise _refused(what, text, "it must have no user and no password")
    password = ""
    if may_have_password:
        user, _, password = user.partition(":")
    if at and not (_USER.fullmatch(user) and _USER.fullmatch(password or "-")):
        raise _refused(what, text, "what is before the '@' is no user name")
    path = slash + rest
    if not _PATH.fullmatch(path) or _BAD_ESCAPE.search(path):
        raise _refused(what, text, "its path must have no query and no fragment, only characters "
                       "of a URL, and others escaped by '%'")  # fmt: skip
    if _climbs(path):
        raise _refused(what, text, "it has a '..'")
    host, port = _host_and_port(what, text, place)
    return Address(found[1].lower(), host, port, path, user)


def parse_host(what: str, text: str) -> str:
    """A name of a host in lower case, or an IP address without brackets.

    Raises:
        RequestError: it is not the usual spelling of a name or an IP address.
    """
    if text.startswith("["):
        try:
            inner = text[1:-1] if text.endswith("]") else ""
            return str(ipaddress.IPv6Address(inner if "%" not in inner else ""))
        except ValueError:
            raise _refused(what, text, "its host is no IPv6 address") from None
    host = text.lower()
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _refused(
                what, text, "write an IPv4 address as four decimal numbers, such as 192.0.2.1"
            ) from None
    if len(host) > _MAX_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise _refused(what, text, "its host may have only letters, digits, '.', '-' and '_'")
    return host


def parse_source(uri: str) -> Source:
    """The parts of the URI of an object store.

    Raises:
        RequestError: for a scheme that is not served, or a bucket or host that is no such name.
    """
    what = "the source"
    found = _SCHEME.match(uri)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in KINDS:
        raise RequestError(
            f"source {_shown(uri)}: the scheme {scheme!r} is not served, only file, hf, "
            f"{', '.join(KINDS)}"
        )
    authority, _, key = uri[found.end() :].partition("/")
    kind = KINDS[scheme]
    if not authority:
        raise RequestError(
            f"source {_shown(uri)} names no {'host' if kind == 'http' else 'bucket'}"
        )
    if kind == "http":
        if "?" in uri or "#" in uri:
            raise RequestError(
                f"source {_shown(uri.partition('?')[0])}: over HTTP an object is named by its "
                "path, without a query, a fragment or a glob"
            )
        address = parse_address(what, f"{scheme}://{authority}", may_have_user=True)
        return Source(scheme, str(address).partition("://")[2], key, address)
    if kind == "az":
        container, at, host = authority.partition("@")
        if not _CONTAINER.fullmatch(container):
            raise _refused(what, uri, f"{container!r} cannot be the name of a container")
        if not at:
            return Source(scheme, container, key)
        host = _name_of_host(what, uri, host)
        named = Address("https", host) if "." in host else None
        return Source(scheme, f"{container}@{host}", key, named)
    check_bucket(what, authority)
    return Source(scheme, authority, key)


def check_bucket(what: str, name: str) -> None:
    """Refuses a name that is not one of a bucket: it may become a part of a host.

    Raises:
        RequestError: names ``what`` and the name.
    """
    if not _BUCKET.fullmatch(name) or ".." in name:
        raise _refused(what, name, f"{name!r} cannot be the name of a bucket")


def check_name(what: str, name: str) -> None:
    """Refuses a region, an account or a tenant that is not a plain name.

    Such a name becomes a part of a host or a path.

    Raises:
        RequestError: names ``what``.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise _refused(what, name, "it may have only letters, digits, '-', '_' and '.'")


def is_ip(host: str) -> bool:
    """Whether a host of `parse_host` is an IP address."""
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _name_of_host(what: str, uri: str, host: str) -> str:
    """The host of an account: a name, without a port."""
    found = parse_host(what, host)
    if is_ip(found):
        raise _refused(what, uri, "the host of an account must be a name")
    return found


def _host_and_port(what: str, text: str, place: str) -> tuple[str, int | None]:
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, colon, port = place, "", ""
    if not host:
        raise _refused(what, text, "it names no host")
    if colon and (not _PORT.fullmatch(port) or int(port) > 65535):
        raise _refused(what, text, "its port must be a number from 1 to 65535")
    try:
        return parse_host(what, host), int(port) if colon else None
    except RequestError as error:
        reason = str(error).rpartition(": ")[2]
        raise _refused(what, text, reason) from None


def _climbs(path: str) -> bool:
    """Whether a path has a ``..``, also behind several escapes."""
    while (plain := unquote(path)) != path:
        path = plain
    return ".." in re.split(r"[/\\]", path)


def _refused(what: str, text: str, reason: str) -> RequestError:
    return RequestError(f"{what} is not right, got {_shown(text)}: {reason}")


def _shown(text: str) -> str:
    """The text in quotes, without what may be a user and a password."""
    scheme, found, rest = text.partition("://")
    if "@" in text:
        text = f"{scheme}{found}...@{rest.rpartition('@')[2]}" if found else "...@..."
    return repr(text[:_MAX_SHOWN])
