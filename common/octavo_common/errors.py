"""Errors that parts without an engine raise too; octavo_engine.errors draws all of them."""

from __future__ import annotations

import errno

DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ModelError(OctavoError):
    """The model's files cannot be used; the message names the file, and the tensor if any."""
