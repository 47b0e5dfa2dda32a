"""An address that is refused is one sentence, and the sentence gives no secret away."""

import pytest

from dflash_core.errors import RecipeError
from dflash_core.http import check_url, is_refused


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


def test_what_is_right_passes() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://models.example/v1", "http://[::1]:8000/v1"):
        check_url(url, "here")


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1%eth0",
        "224.0.0.1",
        "fd00:ec2::254",
        "64:ff9b::a9fe:a9fe",
        "::a9fe:a9fe",
        "::ffff:a9fe:a9fe",
    ],
)
def test_refused_addresses(address: str) -> None:
    assert is_refused(address)
    assert not is_refused("10.0.0.1")
    assert not any(map(is_refused, ("::1", "::", "64:ff9b::0a00:1")))
