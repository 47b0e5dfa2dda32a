"""Which addresses a recipe may make us talk to: http(s) services, never a cloud's metadata service.

A name can resolve to anything, and differently every time; so clients that follow names check the numeric address they
are about to connect to (`is_refused`), and `check_url` is only the early, readable refusal.
"""

import ipaddress
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from dflash_core.errors import RecipeError

METADATA_ADDRESSES = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
"""Metadata services that are not link-local (the link-local ones, 169.254.0.0/16 and fe80::/10, are refused whole)."""

EMBEDDING = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""IPv4-compatible addresses and those of NAT64."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A server that sends us elsewhere is not the one that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def is_refused(address: str) -> bool:
    """Whether a numeric address is link-local, multicast or a known metadata service, also inside an IPv6 one."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        number = number.ipv4_mapped or number.sixtofour or _embedded(number) or number
    return number.is_link_local or number.is_multicast or str(number) in METADATA_ADDRESSES


def _embedded(number: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address in the last 32 bits, where the first 96 say that there is one."""
    return ipaddress.IPv4Address(int(number) & 0xFFFFFFFF) if any(number in net for net in EMBEDDING) else None


def check_resolved(url: str, where: str) -> None:
    """`check_url`, and refuse a name or number that now resolves to a refused address; one that does not is let pass.

    For clients that cannot check the address they connect to. A name that changes its mind afterwards escapes.

    Raises:
        RecipeError: like `check_url`.
    """
    check_url(url, where)
    host = urlsplit(url).hostname or ""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return  # the client's own attempt says so
    for address in sorted(found):
        if is_refused(address):
            raise RecipeError(f"{where} names {host}, which is {address}, an address that is never talked to")


def check_url(url: str, where: str) -> None:
    """Refuse what can be seen to be wrong in the text of an address.

    Raises:
        RecipeError: no http(s), no host, a user or password in it, or a refused numeric address; `where` names it.
            The sentence shows scheme and host alone: the rest may hold a secret.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        parts.port  # noqa: B018 - raises ValueError where it is no number
    except ValueError:
        raise RecipeError(f"{where} is no http(s) address: its host or port cannot be read; correct it") from None
    if "@" in parts.netloc:
        raise RecipeError(f"{where} has a user or password in it; give the address alone, secrets in the environment")
    if parts.scheme not in ("http", "https") or not host:
        raise RecipeError(f"{where} must be an http(s) address, for example http://127.0.0.1:8000/v1")
    shown = f"{parts.scheme}://{host}"
    if parts.query or parts.fragment:
        raise RecipeError(f"{where} {shown} must end with its path, without ? and #")
    try:
        refused = is_refused(host)
    except ValueError:
        return  # a name
    if refused:
        raise RecipeError(f"{where} {shown} is a link-local or metadata address, which is never talked to")
