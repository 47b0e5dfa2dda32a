"""HTTP to servers that a recipe or a command names: never a cloud's metadata service, never where a redirect points.

A name can resolve to anything, and differently every time. So `pinned_client` and `pinned_async_client` resolve the
name themselves for every request, refuse what must not be talked to, and connect to the number; they read nothing from
the environment. `open_client` is for a server that one user names for one command: the name is checked once, and a
proxy of the environment is used, except to loopback.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx2

from dflash_core.errors import RecipeError, UserError

METADATA_ADDRESSES = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
"""Metadata services that are not link-local (the link-local ones, 169.254.0.0/16 and fe80::/10, are refused whole)."""
EMBEDDING = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""IPv4-compatible addresses and those of NAT64."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEEPALIVE_S = 4.0
"""Below the five seconds after which common servers close an idle connection."""
UNLIMITED = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)


class AddressRefused(UserError):
    """A name resolves to an address that is never talked to."""


def is_refused(address: str) -> bool:
    """Whether a numeric address is link-local, multicast or a known metadata service, also inside an IPv6 one."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        inside = number.ipv4_mapped or number.sixtofour
        if inside is None and any(number in net for net in EMBEDDING):  # the first 96 bits say that an IPv4 one follows
            inside = ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
        number = inside or number
    return number.is_link_local or number.is_multicast or str(number) in METADATA_ADDRESSES


def check_url(url: str, where: str) -> None:
    """Refuse what can be seen to be wrong in the text of an address.

    Raises:
        RecipeError: not http(s), without a host, with a user or password, or a refused numeric address; `where` names
            it. The sentence shows scheme and host alone: the rest may hold a secret.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        parts.port  # noqa: B018 - raises ValueError where it is not a number
    except ValueError:
        raise RecipeError(f"{where} is not an http(s) address: its host or port cannot be read; correct it") from None
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


def check_resolved(url: str, where: str) -> None:
    """`check_url`, and refuse a name that now resolves to a refused address; one that does not resolve passes.

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


def open_client(url: str, timeout_s: float) -> httpx2.Client:
    """A client for the server at `url`, checked before by `check_resolved`."""
    return httpx2.Client(timeout=timeout_s, follow_redirects=False, trust_env=urlsplit(url).hostname not in LOOPBACK)


def pinned_client(timeout_s: float) -> httpx2.Client:
    """A client that checks every address it connects to.

    Its requests raise AddressRefused, or what httpx2 raises.
    """
    return httpx2.Client(transport=_Pinned(), timeout=timeout_s, follow_redirects=False, trust_env=False)


def pinned_async_client(timeout: httpx2.Timeout) -> httpx2.AsyncClient:
    """The same for an event loop, with any number of connections."""
    return httpx2.AsyncClient(transport=_AsyncPinned(), timeout=timeout, follow_redirects=False, trust_env=False)


class _Pinned(httpx2.BaseTransport):
    def __init__(self) -> None:
        self._inner = httpx2.HTTPTransport(trust_env=False, limits=UNLIMITED)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        host, port = request.url.host, request.url.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx2.ConnectError(f"{host} cannot be resolved: {error}", request=request) from error
        *others, last = _numbers(host, found)
        for number in others:
            try:
                return self._inner.handle_request(_to_number(request, host, number))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return self._inner.handle_request(_to_number(request, host, last))

    def close(self) -> None:
        self._inner.close()


class _AsyncPinned(httpx2.AsyncBaseTransport):
    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False, limits=UNLIMITED)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host, port = request.url.host, request.url.port
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx2.ConnectError(f"{host} cannot be resolved: {error}", request=request) from error
        *others, last = _numbers(host, found)
        for number in others:
            try:
                return await self._inner.handle_async_request(_to_number(request, host, number))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_to_number(request, host, last))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _numbers(host: str, found: Iterable[tuple[object, object, int, str, tuple[object, ...]]]) -> list[str]:
    """The addresses of a host, in the resolver's order; a refused one among them refuses the host."""
    numbers = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for number in numbers:
        if is_refused(number):
            raise AddressRefused(f"{host} is {number}, a link-local or metadata address, which is never talked to")
    return numbers


def _to_number(request: httpx2.Request, host: str, number: str) -> httpx2.Request:
    """The same request to one of the host's addresses; its Host header and its TLS certificate stay the name's."""
    url = request.url.copy_with(host=number.partition("%")[0])
    return httpx2.Request(
        request.method,
        url,
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )
