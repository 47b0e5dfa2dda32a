"""A bucket and prefix with verified reads and whole writes.

Every object is written in one PUT with its sha256 in the metadata; a set of objects becomes visible through a manifest
that is written last and names each with size and sha256. Readers go through manifests and verify what they read, so an
interrupted writer leaves orphans, never half an artefact.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import boto3
import botocore.session
from boto3.exceptions import RetriesExceededError, S3UploadFailedError
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from pydantic import ValidationError

from dflash_core.errors import ObjectChanged, ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.http import check_resolved
from dflash_core.local_files import sha256_file
from dflash_core.recipe import StorageSettings
from dflash_core.records import Record, StoredObject

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

AnyRecord = TypeVar("AnyRecord", bound=Record)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
"""Before a body that broke off is asked for again; it doubles."""


@dataclass(frozen=True)
class Access:
    """How the object store is reached where the recipe does not say it; None: as boto3 finds it by itself."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    past_proxies: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it says everything: then nothing of the user's own, a profile for example, gets in."""
        return None not in (self.endpoint_url, self.region, self.access_key, self.secret_key)

    def environment(self) -> dict[str, str]:
        """The same as variables, for programs of others that we start."""
        variables = {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_PROFILE": self.profile,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.session_token,
            "NO_PROXY": "127.0.0.1,localhost" if self.past_proxies else None,
        }
        return {name: value for name, value in variables.items() if value is not None}


NOTHING_SAID = Access()


def make_client(storage: StorageSettings, access: Access = NOTHING_SAID) -> "S3Client":
    """A boto3 client, shared by a process's threads; a child process makes its own.

    Raises:
        RecipeError: the endpoint is not an http(s) address, or a link-local one.
        StorageError: boto3 cannot make one.
    """
    if storage.endpoint_url is not None:
        check_resolved(storage.endpoint_url, "storage.endpoint_url")
    checksums: Literal["when_supported", "when_required"] = (
        "when_supported" if storage.request_checksums else "when_required"
    )
    try:
        return _session(access).client(
            "s3",
            endpoint_url=storage.endpoint_url or access.endpoint_url,
            region_name=storage.region or access.region,
            aws_access_key_id=access.access_key,
            aws_secret_access_key=access.secret_key,
            aws_session_token=access.session_token,
            config=Config(
                max_pool_connections=storage.downloads + storage.uploads,
                connect_timeout=storage.connect_timeout_s,
                read_timeout=storage.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": storage.attempts},
                request_checksum_calculation=checksums,
                response_checksum_validation=checksums,
                proxies={} if access.past_proxies else None,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"an S3 client cannot be made: {error}; check the AWS_* variables") from None


def _session(access: Access) -> boto3.Session:
    if access.profile is None and access.is_complete:
        # AWS_PROFILE is not looked at: a profile that does not exist would be an error, one that does has settings.
        return boto3.Session(botocore_session=botocore.session.Session({"profile": (None, None, None, None)}))
    return boto3.Session(profile_name=access.profile)


class ListedObject(NamedTuple):
    """An object as a listing shows it."""

    key: str
    """Relative to the store's prefix."""
    size: int
    etag: str


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

    def list(self, below: str = "") -> Iterator[ListedObject]:
        """All objects below `below`, in key order, however many pages."""
        try:
            for page in self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + below
            ):
                for entry in page.get("Contents", []):
                    yield ListedObject(entry["Key"].removeprefix(self.prefix), entry["Size"], entry["ETag"].strip('"'))
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, "listing", below) from error

    def get(self, key: str, *, etag: str | None = None) -> Download:
        """Read a whole object.

        Raises:
            ObjectMissing: there is not such an object.
            ObjectChanged: `etag` is given and the object now has another.
            StorageError: after `attempts` tries the body is still short or broken off.
        """
        condition = {"IfMatch": f'"{etag}"'} if etag is not None else {}
        for attempt in range(self.attempts):
            try:  # the client itself tries again until there is an answer
                answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, **condition)  # type: ignore[arg-type]
            except (ClientError, BotoCoreError) as error:
                raise self._explain(error, "reading", key) from error
            try:
                body, expected = answer["Body"].read(), answer.get("ContentLength")
                if len(body) == expected:
                    return Download(body, answer["ETag"].strip('"'), hashlib.sha256(body).hexdigest())
                problem = f"got {len(body)} of {expected} bytes"
            except BotoCoreError as error:
                problem = str(error)
            if attempt < self.attempts - 1:
                time.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**attempt))
        raise StorageError(f"reading {self.uri(key)}: {problem}, in each of {self.attempts} tries")

    def put(self, key: str, body: bytes, content_type: str = "application/octet-stream") -> StoredObject:
        """Write a whole object, its sha256 in the metadata; overwriting with the same bytes is harmless."""
        digest = hashlib.sha256(body).hexdigest()
        try:
            answer = self.client.put_object(
                Bucket=self.bucket,
                Key=self.prefix + key,
                Body=body,
                ContentType=content_type,
                Metadata={"sha256": digest},
            )
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, "writing", key) from error
        return StoredObject(key=key, size=len(body), sha256=digest, etag=answer["ETag"].strip('"'))

    def create(self, key: str, body: bytes) -> bool:
        """Write an object that must not exist yet; of several writers exactly one gets True. False: another was first.

        Raises:
            StorageError: the store refuses or is unreachable.
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
            # The store refuses because somebody was first. That may have been us: where the answer to a successful try
            # is lost, the client tries again by itself and meets its own object. So the object decides who won, not
            # the refusal: if it has our bytes, nobody else can have written anything in between.
            if _status(error) in (409, 412):
                return self.holds(stored)
            raise self._explain(error, "writing", key) from error
        except BotoCoreError as error:
            raise self._explain(error, "writing", key) from error
        return True

    def read(self, stored: StoredObject) -> bytes:
        """Read what a manifest names and verify it.

        Raises:
            ObjectCorrupt: length or sha256 differ from the manifest's.
        """
        got = self.get(stored.key)
        if len(got.body) != stored.size or got.sha256 != stored.sha256:
            raise ObjectCorrupt(
                f"{self.uri(stored.key)} has {len(got.body)} bytes with sha256 {got.sha256[:12]}, its manifest says "
                f"{stored.size} with {stored.sha256[:12]}: it was damaged or overwritten; delete it, then "
                "rematerialize it"
            )
        return got.body

    def holds(self, stored: StoredObject) -> bool:
        """Whether the named object is there with the recorded size and sha256 metadata (one HEAD, no body)."""
        head = self._head(stored.key)
        return head is not None and (head[0], head[1].get("sha256")) == (stored.size, stored.sha256)

    def find_metadata(self, key: str) -> dict[str, str] | None:
        """What was written with an object; None: the object does not exist."""
        head = self._head(key)
        return None if head is None else head[1]

    def delete(self, key: str) -> None:
        """Delete one object; one that is gone already is fine."""
        try:
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + key)
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, "deleting", key) from error

    def upload(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> StoredObject:
        """Write a file of any size as one object (a large one travels in parts), its sha256 in the metadata.

        Raises:
            StorageError: the store refuses or is unreachable.
        """
        digest = sha256_file(path)
        try:
            extra = {"Metadata": {**(metadata or {}), "sha256": digest}}
            self.client.upload_file(str(path), self.bucket, self.prefix + key, ExtraArgs=extra)
        except (ClientError, BotoCoreError) as error:
            raise self._explain(error, "writing", key) from error
        except S3UploadFailedError as error:
            raise StorageError(f"writing {self.uri(key)}: {error}; run the same command again") from error
        return StoredObject(key=key, size=path.stat().st_size, sha256=digest)

    def download(self, stored: StoredObject, path: Path) -> None:
        """Read what a manifest names into `path`, which appears only when size and sha256 are right.

        Raises:
            ObjectMissing: there is not such an object.
            ObjectCorrupt: size or sha256 differ from the manifest's.
        """
        aside = path.with_name(f".{path.name}.part")
        try:
            try:
                self.client.download_file(self.bucket, self.prefix + stored.key, str(aside))
            except (ClientError, BotoCoreError) as error:
                raise self._explain(error, "reading", stored.key) from error
            except RetriesExceededError as error:
                raise StorageError(f"reading {self.uri(stored.key)}: {error}; run the same command again") from error
            if aside.stat().st_size != stored.size or sha256_file(aside) != stored.sha256:
                raise ObjectCorrupt(
                    f"{self.uri(stored.key)} is not what its manifest says: it was damaged or replaced; delete it, "
                    "then rematerialize it"
                )
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

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
                f"{self.uri(key)} is not a {kind.__name__} this version can read ({error.error_count()} problems, "
                f"first: {error.errors()[0]['msg']}); rematerialize it"
            ) from None

    def find_record(self, key: str, kind: type[AnyRecord]) -> AnyRecord | None:
        """Like `get_record`; None where there is none, or one that cannot be read and must be made again."""
        try:
            return self.get_record(key, kind)
        except (ObjectMissing, ObjectCorrupt):
            return None

    def _head(self, key: str) -> tuple[int, dict[str, str]] | None:
        """Size in bytes and metadata."""
        try:
            head = self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise self._explain(error, "looking at", key) from error
        except BotoCoreError as error:
            raise self._explain(error, "looking at", key) from error
        return head["ContentLength"], head["Metadata"]

    def _explain(self, error: ClientError | BotoCoreError, doing: str, key: str) -> StorageError:
        """The sentence for a failed call."""
        what = f"{doing} {self.uri(key)}"
        if isinstance(error, NoCredentialsError):
            return StorageError(
                f"{what}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile)"
            )
        if isinstance(error, BotoCoreError):
            return StorageError(f"{what}: {error}; check the endpoint (AWS_ENDPOINT_URL or storage.endpoint_url)")
        code, status = error.response.get("Error", {}).get("Code", ""), _status(error)
        if code == "NoSuchBucket":
            return StorageError(f"{what}: bucket {self.bucket!r} does not exist; create it or correct it in the recipe")
        if code == "NoSuchKey" or status == 404:
            return ObjectMissing(f"{what}: the object does not exist")
        if code == "PreconditionFailed" or status == 412:
            return ObjectChanged(f"{what}: the object was replaced since it was listed; run this partition again")
        if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
            return StorageError(f"{what}: the store refuses the credentials ({code}); check the AWS_* variables")
        if code == "NotImplemented" or status == 501:
            return StorageError(
                f"{what}: the store does not know what was asked ({error}); if it refuses the checksums of recent "
                "clients, set storage.request_checksums = false"
            )
        if status == 403:
            return StorageError(
                f"{what}: access denied ({code}); these credentials may not do this in bucket {self.bucket!r}"
            )
        return StorageError(f"{what}: {error}")


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
