"""spec.cache: where fetched weights lie, so that the next pod need not fetch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from octavo_operator.spec.model import OBJECT_NAME

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

CacheKind = Literal["EmptyDir", "PersistentVolumeClaim", "HostPath"]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    kind: CacheKind = "EmptyDir"  # each pod fetches for itself
    size: str = "20Gi"
    storage_class: str | None = None  # None: the cluster's default
    access_mode: AccessMode = "ReadWriteOnce"
    existing_claim: str = ""  # shared with others; not made, not deleted
    host_path: str = ""

    @property
    def has_own_claim(self) -> bool:
        return self.kind == "PersistentVolumeClaim" and not self.existing_claim

    @property
    def is_of_one_node(self) -> bool:
        """Whether the pods of one node only can have it."""
        return self.has_own_claim and self.access_mode == "ReadWriteOnce"


def read_cache(fields: FieldReader) -> CacheSpec:
    storage_class = fields.raw("storageClassName")
    if storage_class is not None:
        fields.text(
            "storageClassName", longest=253, pattern=f"({OBJECT_NAME})?", form="a StorageClass"
        )
    cache = CacheSpec(
        kind=fields.choice("kind", get_args(CacheKind), "EmptyDir"),
        size=fields.maybe_quantity("size") or "20Gi",
        storage_class=storage_class,
        access_mode=fields.choice("accessMode", get_args(AccessMode), "ReadWriteOnce"),
        existing_claim=fields.text(
            "existingClaim", longest=253, pattern=f"({OBJECT_NAME})?", form="the name of a claim"
        ),
        host_path=fields.text(
            "hostPath", longest=1024, pattern="(/.*)?", form="an absolute path on the node"
        ),
    )
    if cache.kind == "HostPath" and not cache.host_path:
        raise fields.fail("hostPath", "is required for kind: HostPath")
    if cache.kind != "HostPath" and cache.host_path:
        raise fields.fail("hostPath", "needs kind: HostPath; set it, or leave hostPath out")
    if ".." in cache.host_path.split("/"):
        raise fields.fail("hostPath", "must not have .. in it")
    for name, value in (
        ("existingClaim", cache.existing_claim),
        ("storageClassName", storage_class),
    ):
        if cache.kind != "PersistentVolumeClaim" and value:
            raise fields.fail(
                name, f"needs kind: PersistentVolumeClaim; set it, or leave {name} out"
            )
    if cache.existing_claim and storage_class:
        raise fields.fail("storageClassName", "is that of existingClaim already; leave it out")
    fields.end()
    return cache
