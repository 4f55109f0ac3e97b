"""spec.group: several pods that are one engine, each with some of the model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_operator.spec.model import OBJECT_NAME

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

SECRET_KEY = "secret"  # of the Secret that all pods of a group have
MAX_GROUP_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What makes one replica of several pods."""

    size: int  # pods of a replica, that which serves included
    secret: str  # name of the Secret by which they know each other


def read_group(fields: FieldReader) -> GroupSpec:
    secret = fields.optional("secretRef")
    if secret is None:
        raise fields.fail(
            "secretRef",
            f"is required: a Secret whose key {SECRET_KEY} has 16 bytes or more, by which the pods "
            "of a group know each other",
        )
    size = fields.maybe_integer("size", least=2, most=MAX_GROUP_SIZE)
    if size is None:
        raise fields.fail("size", "is required: the pods of one replica")
    group = GroupSpec(
        size=size,
        secret=secret.required_text(
            "name", longest=253, pattern=OBJECT_NAME, form="the name of a Secret"
        ),
    )
    secret.end()
    fields.end()
    return group
