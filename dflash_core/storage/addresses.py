"""Which addresses a recipe may make us talk to: http(s) services, never a cloud's metadata service.

A name can resolve to anything, and differently every time; so clients that follow names check the numeric address they
are about to connect to (`is_refused`), and `check_url` is only the early, readable refusal.
"""

import ipaddress
from urllib.parse import urlsplit

from dflash_core.errors import RecipeError

METADATA_ADDRESSES = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
"""Metadata services that are not link-local (the link-local ones, 169.254.0.0/16 and fe80::/10, are refused whole)."""


def is_refused(address: str) -> bool:
    """Whether a numeric address is link-local, multicast or a known metadata service, also when mapped into IPv6."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        number = number.ipv4_mapped or number.sixtofour or number
    return number.is_link_local or number.is_multicast or str(number) in METADATA_ADDRESSES


def check_url(url: str, where: str) -> None:
    """Refuse what can be seen to be wrong in the text of an address.

    Raises:
        RecipeError: no http(s), no host, a user or password in it, or a refused numeric address; `where` names it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RecipeError(f"{where} {url!r} must be an http(s) address")
    if parts.username is not None or parts.password is not None:
        raise RecipeError(f"{where} has a user or password in it; give the address alone, secrets in the environment")
    if parts.query or parts.fragment:
        raise RecipeError(f"{where} {url!r} must end with its path, without ? and #")
    try:
        refused = is_refused(parts.hostname)
    except ValueError:
        return  # a name
    if refused:
        raise RecipeError(f"{where} {url!r} is a link-local or metadata address, which is never talked to")
