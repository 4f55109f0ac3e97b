"""A Secret by which pods of one LLMDeployment know each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_operator.spec.model import OBJECT_NAME

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

SECRET_KEY = "secret"  # of the Secret


def read_shared_secret(fields: FieldReader, purpose: str, *, form: str = "16 bytes or more") -> str:
    """The name in `secretRef`. Raises SpecInvalid, with the `purpose` where there is none."""
    secret = fields.optional("secretRef")
    if secret is None:
        raise fields.fail(
            "secretRef",
            f"is required: a Secret whose key {SECRET_KEY} has {form}, by which {purpose}",
        )
    name = secret.required_text(
        "name", longest=253, pattern=OBJECT_NAME, form="the name of a Secret"
    )
    secret.end()
    return name
