"""An address that is refused is one sentence, and the sentence gives no secret away."""

import socket
from typing import Any

import pytest

from dflash_core.errors import RecipeError
from dflash_core.recipe import Storage
from dflash_core.storage.addresses import check_url
from dflash_core.storage.store import make_client


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://[bad/v1?key=s3cret", "cannot be read"),
        ("http://host:port/s3cret", "cannot be read"),
        ("ftp://user:s3cret@host/v1", "has a user or password in it"),
        ("http://user:s3cret@host/v1?key=s3cret", "has a user or password in it"),
        ("user:s3cret@host/v1", r"must be an http\(s\) address"),
        ("ftp://host/s3cret", r"must be an http\(s\) address"),
        ("https://host:8000/v1?key=s3cret", "https://host must end with its path"),
        ("http://169.254.169.254/s3cret", r"http://169\.254\.169\.254 is a link-local"),
    ],
)
def test_what_is_refused_shows_no_secret(url: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=f"^here.*{sentence}") as refused:
        check_url(url, "here")
    assert "s3cret" not in str(refused.value)


def test_a_store_whose_name_is_that_of_a_metadata_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **named: Any) -> Any:
        return real("169.254.169.254" if host == "metadata.example" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host in ("metadata.example", "2852039166"):
        with pytest.raises(RecipeError, match=rf"endpoint_url names {host}, which is 169\.254\.169\.254"):
            make_client(Storage(bucket="b", endpoint_url=f"http://{host}"))


def test_what_is_right_passes() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://models.example/v1", "http://[::1]:8000/v1"):
        check_url(url, "here")
