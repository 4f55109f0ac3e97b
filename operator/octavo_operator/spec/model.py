"""spec.model: where weights come from and what they are called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from octavo_operator.errors import SpecInvalid
from octavo_operator.spec.fields import FieldReader, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Scheme = Literal["hf", "s3", "gs", "oci", "http", "https", "pvc", "file", "demo"]
SCHEMES = get_args(Scheme)
# In the image, or mounted already: nothing is brought there.
LOCAL_SCHEMES = frozenset(("pvc", "file", "demo"))

LONGEST_URI = 1024
SERVED_NAME = r"[A-Za-z0-9]([A-Za-z0-9._:/@-]*[A-Za-z0-9])?"
OBJECT_NAME = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
DIGEST = r"sha256:[0-9a-f]{64}"

_FORMS: Mapping[str, tuple[str, str]] = {
    "hf": (
        r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_./-]+)?(/[A-Za-z0-9_./ -]+)?",
        "hf://ORGANISATION/NAME, and optionally @REVISION or /FILE.gguf",
    ),
    "s3": (r"[A-Za-z0-9_.-]+(/.*)?", "s3://BUCKET/PATH"),
    "gs": (r"[A-Za-z0-9_.-]+(/.*)?", "gs://BUCKET/PATH"),
    "oci": (
        r"[A-Za-z0-9_.:-]+/[A-Za-z0-9_./-]+(:[A-Za-z0-9_.-]+)?(@sha256:[0-9a-f]{64})?",
        "oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST",
    ),
    "http": (r"[^/@ ]+/[^ ]+", "http://HOST/PATH without a user name"),
    "https": (r"[^/@ ]+/[^ ]+", "https://HOST/PATH without a user name"),
    "pvc": (OBJECT_NAME + r"(/.*)?", "pvc://CLAIM/PATH"),
    "file": (r"/.+", "file:///ABSOLUTE/PATH"),
    "demo": (r"[a-z0-9-]+", "demo://NAME"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is served."""

    uri: str
    scheme: Scheme
    served_name: str
    revision: str = ""  # branch, tag or commit; hf only
    digest: str = ""  # sha256:… of what was fetched
    aliases: tuple[str, ...] = ()
    secret: str = ""  # Secret in the same namespace, with the source's credentials

    @property
    def names(self) -> tuple[str, ...]:
        return (self.served_name, *self.aliases)

    @property
    def location(self) -> str:
        """The URI without its scheme."""
        return self.uri.partition("://")[2]

    @property
    def is_fetched(self) -> bool:
        """Whether an init step brings it."""
        return self.scheme not in LOCAL_SCHEMES

    @property
    def claim(self) -> str:
        """The PersistentVolumeClaim that holds it already, or ''."""
        return self.location.partition("/")[0] if self.scheme == "pvc" else ""


def read_model(fields: FieldReader, *, deployment_name: str) -> ModelSpec:
    uri = fields.required_text("uri", longest=LONGEST_URI)
    scheme = check_uri(uri, fields.at("uri"))
    reference = fields.optional("secretRef")
    model = ModelSpec(
        uri=uri,
        scheme=scheme,
        served_name=fields.text(
            "servedName", longest=128, pattern=f"({SERVED_NAME})?", form=NAME_FORM
        )
        or deployment_name,
        revision=fields.text(
            "revision", longest=256, pattern=f"({REVISION})?", form="a branch, tag or commit"
        ),
        digest=fields.text(
            "digest", longest=71, pattern=f"({DIGEST})?", form="sha256: and 64 hexadecimal digits"
        ),
        aliases=fields.items("aliases", _served_name, most=16),
        secret="" if reference is None else _object_name(reference),
    )
    if model.revision and scheme != "hf":
        raise fields.fail("revision", "applies to hf:// only; name the version in the uri instead")
    if model.revision and "@" in uri:
        raise fields.fail("revision", "is in the uri already; say it in one place")
    for name, value in (("digest", model.digest), ("secretRef", model.secret)):
        if value and not model.is_fetched:
            raise fields.fail(
                name, f"applies to models that are fetched; {scheme}:// is not, so leave it out"
            )
    if len(set(model.names)) < len(model.names):
        raise fields.fail("aliases", "must differ from each other and from servedName")
    fields.end()
    return model


def check_uri(uri: str, path: str, schemes: Sequence[str] = SCHEMES) -> Scheme:
    """The scheme of a well-formed URI. Raises SpecInvalid that shows the right form."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in schemes:
        known = ", ".join(f"{known}://" for known in schemes)
        hint = (
            f" (a model of the hub is hf://{uri})" if re.fullmatch(r"[\w.-]+/[\w.-]+", uri) else ""
        )
        raise SpecInvalid(path, f"must start with one of {known}; got {show(uri)}{hint}")
    pattern, form = _FORMS[scheme]
    if not re.fullmatch(pattern, rest):
        raise SpecInvalid(path, f"must have the form {form}; got {show(uri)}")
    if ".." in rest.split("/"):
        raise SpecInvalid(path, f"must not have .. in its path; got {show(uri)}")
    return cast("Scheme", scheme)


NAME_FORM = "letters, digits and . _ : / @ -, with a letter or digit at both ends"


def _served_name(value: object, path: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 128:
        raise SpecInvalid(path, f"must be a name of 1 to 128 characters; got {show(value)}")
    if not re.fullmatch(SERVED_NAME, value):
        raise SpecInvalid(path, f"must be {NAME_FORM}; got {show(value)}")
    return value


def _object_name(fields: FieldReader) -> str:
    name = fields.required_text(
        "name", longest=253, pattern=OBJECT_NAME, form="the name of a Secret"
    )
    fields.end()
    return name
