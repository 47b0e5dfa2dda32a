"""A bucket and prefix with verified reads and whole writes.

Every object is written in one PUT with its sha256 in the metadata; a set of objects becomes visible through a manifest
that is written last and names each with size and sha256. Readers go through manifests and verify what they read, so an
interrupted writer leaves orphans, never half an artefact.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from pydantic import ValidationError

from dflash_core.errors import ObjectChanged, ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.recipe import Recipe, Storage
from dflash_core.records import Record, SourceFile, StoredObject
from dflash_core.storage.addresses import check_resolved
from dflash_core.storage.keys import is_completions, partition_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

AnyRecord = TypeVar("AnyRecord", bound=Record)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
"""Before a body that broke off is asked for again; it doubles."""


def make_client(storage: Storage, credentials: tuple[str, str] | None = None) -> "S3Client":
    """A boto3 client: one per process, made after forking, shared by that process's threads.

    `credentials` (access key, secret key) None: boto3's own search, the AWS variables first.

    Raises:
        RecipeError: the endpoint is no http(s) address or a link-local one.
    """
    if storage.endpoint_url is not None:
        check_resolved(storage.endpoint_url, "storage.endpoint_url")
    checksums: Literal["when_supported", "when_required"] = (
        "when_supported" if storage.request_checksums else "when_required"
    )
    access_key, secret_key = credentials or (None, None)
    try:
        return boto3.Session().client(
            "s3",
            endpoint_url=storage.endpoint_url,
            region_name=storage.region,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=Config(
                max_pool_connections=storage.downloads + storage.uploads,
                connect_timeout=storage.connect_timeout_s,
                read_timeout=storage.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": storage.attempts},
                request_checksum_calculation=checksums,
                response_checksum_validation=checksums,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"no S3 client can be made: {error}; check the AWS_* variables") from None


@dataclass(frozen=True)
class Download:
    """One object's bytes, complete and hashed."""

    body: bytes
    etag: str
    sha256: str


@dataclass(frozen=True)
class Store:
    """Objects below `prefix` in `bucket`. Keys of all methods are relative to the prefix."""

    client: "S3Client" = field(repr=False)
    bucket: str
    prefix: str = ""
    attempts: int = 5

    def uri(self, key: str) -> str:
        """`s3://bucket/prefix/key`."""
        return f"s3://{self.bucket}/{self.prefix}{key}"

    def list(self, below: str = "") -> Iterator[tuple[str, int, str]]:
        """All objects below `below`: (key, size, ETag), in key order, however many pages."""
        try:
            for page in self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + below
            ):
                for entry in page.get("Contents", []):
                    yield entry["Key"].removeprefix(self.prefix), entry["Size"], entry["ETag"].strip('"')
        except (ClientError, BotoCoreError) as error:
            raise explain(error, f"listing {self.uri(below)}", self.bucket) from error

    def get(self, key: str, *, etag: str | None = None) -> Download:
        """Read a whole object.

        Raises:
            ObjectMissing: no such object.
            ObjectChanged: `etag` is given and the object now has another.
            StorageError: after `attempts` tries the body is still short or broken off.
        """
        what = f"reading {self.uri(key)}"
        condition = {"IfMatch": f'"{etag}"'} if etag is not None else {}
        for attempt in range(self.attempts):
            try:  # the client itself tries again until there is an answer
                answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, **condition)  # type: ignore[arg-type]
            except (ClientError, BotoCoreError) as error:
                raise explain(error, what, self.bucket) from error
            try:
                body, expected = answer["Body"].read(), answer.get("ContentLength")
                if len(body) == expected:
                    return Download(body, answer["ETag"].strip('"'), hashlib.sha256(body).hexdigest())
                problem = f"got {len(body)} of {expected} bytes"
            except BotoCoreError as error:
                problem = str(error)
            if attempt < self.attempts - 1:
                time.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**attempt))
        raise StorageError(f"{what}: {problem}, in each of {self.attempts} tries")

    def put(self, key: str, body: bytes, content_type: str = "application/octet-stream") -> StoredObject:
        """Write a whole object, its sha256 in the metadata; overwriting with the same bytes is harmless."""
        digest = hashlib.sha256(body).hexdigest()
        try:
            self.client.put_object(
                Bucket=self.bucket,
                Key=self.prefix + key,
                Body=body,
                ContentType=content_type,
                Metadata={"sha256": digest},
            )
        except (ClientError, BotoCoreError) as error:
            raise explain(error, f"writing {self.uri(key)}", self.bucket) from error
        return StoredObject(key=key, size=len(body), sha256=digest)

    def create(self, key: str, body: bytes) -> bool:
        """Write an object that must not exist yet; of several writers exactly one gets True, also after a lost answer.

        False: another's object is there.
        """
        stored = StoredObject(key=key, size=len(body), sha256=hashlib.sha256(body).hexdigest())
        try:
            self.client.put_object(
                Bucket=self.bucket,
                Key=self.prefix + key,
                Body=body,
                IfNoneMatch="*",
                Metadata={"sha256": stored.sha256},
            )
        except ClientError as error:
            if _status(error) in (409, 412):
                return self.holds(stored)  # our own, if the answer to an earlier try was lost
            raise explain(error, f"writing {self.uri(key)}", self.bucket) from error
        except BotoCoreError as error:
            raise explain(error, f"writing {self.uri(key)}", self.bucket) from error
        return True

    def read(self, stored: StoredObject) -> bytes:
        """Read what a manifest names and verify it.

        Raises:
            ObjectCorrupt: length or sha256 differ from the manifest's.
        """
        body = self.get(stored.key)
        if len(body.body) != stored.size or body.sha256 != stored.sha256:
            raise ObjectCorrupt(
                f"{self.uri(stored.key)} has {len(body.body)} bytes with sha256 {body.sha256[:12]}, its manifest says "
                f"{stored.size} with {stored.sha256[:12]}: it was damaged or overwritten; delete it, then "
                "rematerialize it"
            )
        return body.body

    def holds(self, stored: StoredObject) -> bool:
        """Whether the named object is there with the recorded size and sha256 metadata (one HEAD, no body)."""
        head = self._head(stored.key)
        return head is not None and (head[0], head[1].get("sha256")) == (stored.size, stored.sha256)

    def find_metadata(self, key: str) -> dict[str, str] | None:
        """What was written beside an object; None: there is no such object."""
        head = self._head(key)
        return None if head is None else head[1]

    def _head(self, key: str) -> tuple[int, dict[str, str]] | None:
        """Size in bytes and metadata."""
        try:
            head = self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise explain(error, f"looking at {self.uri(key)}", self.bucket) from error
        except BotoCoreError as error:
            raise explain(error, f"looking at {self.uri(key)}", self.bucket) from error
        return head["ContentLength"], head["Metadata"]

    def put_record(self, key: str, record: Record) -> StoredObject:
        """Write a manifest as JSON."""
        return self.put(key, record.model_dump_json(indent=1).encode(), "application/json")

    def get_record(self, key: str, kind: type[AnyRecord]) -> AnyRecord:
        """Read a manifest.

        Raises:
            ObjectMissing: not there.
            ObjectCorrupt: not of this form.
        """
        try:
            return kind.model_validate_json(self.get(key).body)
        except ValidationError as error:
            raise ObjectCorrupt(
                f"{self.uri(key)} is no {kind.__name__} this version can read ({error.error_count()} problems, first: "
                f"{error.errors()[0]['msg']}); rematerialize it"
            ) from None

    def find_record(self, key: str, kind: type[AnyRecord]) -> AnyRecord | None:
        """Like `get_record`, None where there is none, or one that cannot be read and must be made anew."""
        try:
            return self.get_record(key, kind)
        except (ObjectMissing, ObjectCorrupt):
            return None


@dataclass(frozen=True)
class Stores:
    """The places a recipe names: the source of completions, the home of everything derived, and maybe prompts."""

    source: Store
    derived: Store
    prompts: Store | None


def open_stores(recipe: Recipe) -> Stores:
    """All stores over one client; make them after forking, once per process."""
    client = make_client(recipe.storage)
    source, storage = recipe.source, recipe.storage
    prompts = None if recipe.generation is None else recipe.generation.prompts
    return Stores(
        Store(client, source.bucket, source.prefix, storage.attempts),
        Store(client, storage.bucket, storage.prefix, storage.attempts),
        None if prompts is None else Store(client, prompts.bucket, prompts.prefix, storage.attempts),
    )


def find_files(source: Store) -> list[SourceFile]:
    """Every JSONL file of a source, sorted by partition; maybe none."""
    files = [
        SourceFile(
            partition=partition_key(source.prefix + key, source.prefix),
            key=source.prefix + key,
            uri=source.uri(key),
            etag=etag,
            size=size,
        )
        for key, size, etag in source.list()
        if is_completions(key)
    ]
    return sorted(files, key=lambda f: f.partition)


def list_sources(source: Store) -> list[SourceFile]:
    """Every file of completions, sorted by partition.

    Raises:
        StorageError: the listing fails or finds no file of completions.
    """
    files = find_files(source)
    if not files:
        raise StorageError(
            f"{source.uri('')} holds no file of completions (*.jsonl, *.jsonl.gz, *.jsonl.zst); "
            "put some there or correct source.bucket and source.prefix in the recipe"
        )
    return files


def explain(error: ClientError | BotoCoreError, what: str, bucket: str) -> StorageError:
    """The sentence for a failed S3 call."""
    if isinstance(error, NoCredentialsError):
        return StorageError(f"{what}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile)")
    if isinstance(error, BotoCoreError):
        return StorageError(f"{what}: {error}; check the endpoint (AWS_ENDPOINT_URL or storage.endpoint_url)")
    code = error.response.get("Error", {}).get("Code", "")
    if code == "NoSuchBucket":
        return StorageError(f"{what}: bucket {bucket!r} does not exist; create it or correct it in the recipe")
    if code == "NoSuchKey" or _status(error) == 404:
        return ObjectMissing(f"{what}: there is no such object")
    if code == "PreconditionFailed" or _status(error) == 412:
        return ObjectChanged(f"{what}: the object was replaced since it was listed; run this partition again")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
        return StorageError(f"{what}: the store refuses the credentials ({code}); check the AWS_* variables")
    if code == "NotImplemented" or _status(error) == 501:
        return StorageError(
            f"{what}: the store does not know what was asked ({error}); if it refuses the checksums of recent clients, "
            "set storage.request_checksums = false"
        )
    if _status(error) == 403:
        return StorageError(f"{what}: access denied ({code}); these credentials may not do this in bucket {bucket!r}")
    return StorageError(f"{what}: {error}")


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
