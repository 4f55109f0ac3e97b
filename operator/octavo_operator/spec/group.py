"""spec.group: several pods that are one engine, each with some of the model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_operator.spec.shared_secret import read_shared_secret

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

MAX_GROUP_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What makes one replica of several pods."""

    size: int  # pods of a replica, that which serves included
    secret: str  # name of the Secret by which they know each other


def read_group(fields: FieldReader) -> GroupSpec:
    secret = read_shared_secret(fields, "the pods of a group know each other")
    size = fields.maybe_integer("size", least=2, most=MAX_GROUP_SIZE)
    if size is None:
        raise fields.fail("size", "is required: the pods of one replica")
    fields.end()
    return GroupSpec(size=size, secret=secret)
