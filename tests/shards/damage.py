"""What happens to objects that nobody watches."""

from collections.abc import Callable

from dflash_core.storage.s3 import Store

OBJECTS = ("shard", "rejects", "statistics")
"""What a manifest names, as `ShardKeys` calls it."""
Damage = Callable[[Store, str], None]


def _shorten(derived: Store, key: str) -> None:
    derived.put(key, derived.get(key).body[:-1])


def _replace(derived: Store, key: str) -> None:
    body = derived.get(key).body
    derived.put(key, body[:-1] + bytes([body[-1] ^ 1]))


def _replace_without_metadata(derived: Store, key: str) -> None:
    """As a program of others does, which keeps no sha256 in the metadata."""
    body = derived.get(key).body
    derived.client.put_object(Bucket=derived.bucket, Key=derived.prefix + key, Body=bytes([body[0] ^ 1]) + body[1:])


DAMAGES: dict[str, Damage] = {
    "deleted": Store.delete,
    "shortened": _shorten,
    "other bytes": _replace,
    "other bytes by others": _replace_without_metadata,
}
