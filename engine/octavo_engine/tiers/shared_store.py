"""A store of KV blocks that several engines share: a folder on a volume, or a bucket.

Engines name the store by an id, so that routers know which of them read the same files: of a folder
a random one that lies in it, since paths differ between pods; of a bucket its address.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import ConfigError
from octavo_engine.tiers.run_folder import LocalFolder

if TYPE_CHECKING:
    from octavo_engine.tiers.run_folder import RunFolder

logger = logging.getLogger(__name__)

# What is assumed before anything was read: low, so that no more than a little time can be lost.
VOLUME_LATENCY_S, VOLUME_BYTES_PER_S = 10e-3, 1e8
BUCKET_LATENCY_S, BUCKET_BYTES_PER_S = 50e-3, 1e8
STALL_S = 10.0  # that a bucket may be silent
ID_FILE = "store-id"
_SCHEME = "s3://"
_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may list, get, put and delete "
    "objects there, or give the pod's ServiceAccount a role that may"
)


class SharedStore(NamedTuple):
    folder: RunFolder
    id: str
    latency_s: float
    bytes_per_s: float


def open_shared(place: str, key: bytes) -> SharedStore:
    """`place`: a folder, or s3://BUCKET/PREFIX. Raises ConfigError where it cannot be used; a
    bucket that only cannot be reached now may be reached later."""
    if place.startswith(_SCHEME):
        return _open_bucket(place, key)
    try:
        folder = LocalFolder(Path(place), key)
        own_id = _folder_id(Path(place))
    except OSError as error:
        raise ConfigError(
            f"--kv-shared-store {place} cannot be used: {error.strerror or error}"
        ) from None
    return SharedStore(folder, _id(own_id, key), VOLUME_LATENCY_S, VOLUME_BYTES_PER_S)


def _open_bucket(place: str, key: bytes) -> SharedStore:
    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.errors import FetchError, Passing
    from octavo_common.remote.http import Http
    from octavo_common.remote.s3_bucket import S3Bucket
    from octavo_engine.tiers.run_bucket import BucketFolder

    name, _, prefix = place.removeprefix(_SCHEME).partition("/")
    prefix = prefix.strip("/")
    try:
        bucket = S3Bucket(name, Http(stall_s=STALL_S), Credentials(os.environ), hint=_HINT)
        folder = BucketFolder(bucket, f"{prefix}/" if prefix else "", key)
        folder.check()
    except Passing as error:
        logger.warning("--kv-shared-store %s is not used for now: %s", place, error)
    except FetchError as error:
        raise ConfigError(f"--kv-shared-store {place} cannot be used: {error}") from None
    own_id = bucket.url(prefix)
    return SharedStore(folder, _id(own_id, key), BUCKET_LATENCY_S, BUCKET_BYTES_PER_S)


def _folder_id(root: Path) -> str:
    """Made by the first engine that may write there. Raises OSError."""
    path = root / ID_FILE
    if not path.exists() and os.access(root, os.W_OK):
        own = root / f"{ID_FILE}.{uuid.uuid4().hex}"
        own.write_text(uuid.uuid4().hex, encoding="ascii")
        try:
            os.link(own, path)  # of several engines one is first, and its file is whole
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            own.replace(path)
        own.unlink(missing_ok=True)
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return uuid.uuid4().hex  # nobody knows who else reads it


def _id(place: str, key: bytes) -> str:
    return hashlib.blake2b(key + place.encode(), digest_size=16).hexdigest()
