"""Files of any size to and from the store, without holding them in memory (large ones travel in parts)."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from boto3.exceptions import RetriesExceededError, S3UploadFailedError
from botocore.exceptions import BotoCoreError, ClientError

from dflash_core.errors import ObjectCorrupt, StorageError
from dflash_core.records import StoredObject
from dflash_core.storage.store import Store, explain

HASH_BLOCK = 1 << 20


def sha256_file(path: Path) -> str:
    """sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def upload_file(store: Store, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> StoredObject:
    """Write a file as one object, its sha256 in the metadata, beside what is given.

    Raises:
        StorageError: the store refuses or is unreachable.
    """
    digest = sha256_file(path)
    try:
        extra = {"Metadata": {**(metadata or {}), "sha256": digest}}
        store.client.upload_file(str(path), store.bucket, store.prefix + key, ExtraArgs=extra)
    except (ClientError, BotoCoreError) as error:
        raise explain(error, f"writing {store.uri(key)}", store.bucket) from error
    except S3UploadFailedError as error:
        raise StorageError(f"writing {store.uri(key)}: {error}; run the same command again") from error
    return StoredObject(key=key, size=path.stat().st_size, sha256=digest)


def download_file(store: Store, stored: StoredObject, path: Path) -> None:
    """Read what a manifest names into `path`, which appears only when size and sha256 are right.

    Raises:
        ObjectMissing: no such object.
        ObjectCorrupt: size or sha256 differ from the manifest's.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        try:
            store.client.download_file(store.bucket, store.prefix + stored.key, str(aside))
        except (ClientError, BotoCoreError) as error:
            raise explain(error, f"reading {store.uri(stored.key)}", store.bucket) from error
        except RetriesExceededError as error:
            raise StorageError(f"reading {store.uri(stored.key)}: {error}; run the same command again") from error
        if aside.stat().st_size != stored.size or sha256_file(aside) != stored.sha256:
            raise ObjectCorrupt(
                f"{store.uri(stored.key)} is not what its manifest says: it was damaged or replaced; delete it, then "
                "rematerialize it"
            )
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def delete_object(store: Store, key: str) -> None:
    """Delete one object; one that is gone already is fine."""
    try:
        store.client.delete_object(Bucket=store.bucket, Key=store.prefix + key)
    except (ClientError, BotoCoreError) as error:
        raise explain(error, f"deleting {store.uri(key)}", store.bucket) from error
