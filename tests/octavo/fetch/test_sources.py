"""Hub, S3, GCS and OCI, each against a small server that speaks its protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from octavo.fetch.errors import FetchError, FetchReason
from octavo.fetch.fetch import FetchRequest, fetch
from octavo.fetch.google_auth import assertion, sign_rs256
from octavo.fetch.progress import FetchProgress
from octavo.fetch.transfer import TransferPatience
from tests.fakes.model_store import Store, StoreReply, StoreRequest, hold_hub_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from octavo.fetch.folder import FolderMark

WEIGHTS = random.Random(3).randbytes(120_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
}
# Never a model's: code, pickles, pictures, other folders.
NOISE = {"modeling.py": b"boom", "pytorch_model.bin": b"boom", "a.png": b"", "onnx/model.onnx": b""}
QUICK = TransferPatience(num_failures=3, first_s=0.0, longest_s=0.0)
COMMIT = "c0ffee" + "0" * 34


@pytest.fixture
def store() -> Iterator[Store]:
    with serving(Store()) as store:
        yield store


def run(uri: str, folder: Path, environ: Mapping[str, str], **more: Any) -> FolderMark:
    requested = FetchRequest(
        uri=uri, folder=folder, range_bytes=50_000, patience=QUICK, stall_s=5.0
    )
    with FetchProgress(uri, out=StringIO()) as progress:
        return fetch(
            replace(requested, **more), progress, environ=environ, sleep=lambda seconds: None
        )


def refused(uri: str, folder: Path, environ: Mapping[str, str], **more: Any) -> FetchError:
    with pytest.raises(FetchError) as caught:
        run(uri, folder, environ, **more)
    return caught.value


def assert_whole(folder: Path, mark: FolderMark) -> None:
    assert {file.name for file in mark.files} == FILES.keys()
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content


# -- the hub


def hub(
    store: Store,
    *,
    token: str = "",
    revision: str = "main",
    more: Mapping[str, bytes] | None = None,
) -> None:
    hold_hub_model(store, "org/name", {**FILES, **NOISE, **(more or {})}, COMMIT, revision)
    info = store.routes.pop("/api/models/")

    def gate(requested: StoreRequest) -> StoreReply | None:
        if token and requested.headers.get("authorization") != f"Bearer {token}":
            return StoreReply(401, headers={"x-error-code": "GatedRepo"})
        return info(requested)

    store.routes["/api/models/"] = gate


def test_the_hub_gives_what_a_model_needs_of_one_commit(store, tmp_path):
    hub(store)
    mark = run("hf://org/name", tmp_path, {"HF_ENDPOINT": store.url})

    assert_whole(tmp_path, mark)
    assert mark.revision == COMMIT
    lines = "".join(
        f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in FILES.items()
    )
    assert mark.digest == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def test_the_hub_s_token_is_shown(store, tmp_path):
    hub(store, token="secret")
    environ = {"HF_ENDPOINT": store.url}

    error = refused("hf://org/name", tmp_path, environ)
    assert error.reason is FetchReason.UNAUTHORIZED and "accept its licence" in str(error)
    assert_whole(tmp_path, run("hf://org/name", tmp_path, {**environ, "HF_TOKEN": "secret"}))


def test_a_token_may_be_a_file_of_the_secret(store, tmp_path):
    hub(store, token="secret")
    credentials = tmp_path / "secret"
    credentials.mkdir()
    (credentials / "HF_TOKEN").write_text("secret\n")
    environ = {"HF_ENDPOINT": store.url, "OCTAVO_CREDENTIALS": str(credentials)}

    assert_whole(tmp_path / "to", run("hf://org/name", tmp_path / "to", environ))


@pytest.mark.parametrize(
    ("uri", "environ", "reason"),
    [
        ("hf://org/name@v9", {}, FetchReason.REVISION_NOT_FOUND),
        ("hf://org/other", {}, FetchReason.UNAUTHORIZED),
        ("hf://org/other", {"HF_TOKEN": "x"}, FetchReason.NOT_FOUND),
        ("hf://org/name/none.gguf", {}, FetchReason.NOT_FOUND),
        ("hf://org", {}, FetchReason.FAILED),
        ("hf://org/../name", {}, FetchReason.FAILED),
    ],
)
def test_the_hub_s_refusals(store, tmp_path, uri, environ, reason):
    hub(store)
    assert refused(uri, tmp_path, {"HF_ENDPOINT": store.url, **environ}).reason is reason


@pytest.mark.parametrize("uri", ["hf://org/name@v1/a.gguf", "hf://org/name/a.gguf@v1"])
def test_one_file_of_a_revision(store, tmp_path, uri):
    hub(store, revision="v1", more={"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    assert [file.name for file in run(uri, tmp_path, {"HF_ENDPOINT": store.url}).files] == [
        "a.gguf"
    ]


def test_bytes_that_the_hub_did_not_promise_are_refused(store, tmp_path):
    hub(store)
    store.files[f"/org/name/resolve/{COMMIT}/model.safetensors"] = WEIGHTS[::-1]
    error = refused("hf://org/name", tmp_path, {"HF_ENDPOINT": store.url})

    assert error.reason is FetchReason.DIGEST_MISMATCH and "model.safetensors" in str(error)
    assert not (tmp_path / "model.safetensors").exists()


def test_pickles_alone_are_no_model(store, tmp_path):
    hub(store)
    reported = {"sha": COMMIT, "siblings": [{"rfilename": "pytorch_model.bin", "size": 3}]}
    store.routes["/api/models/"] = lambda requested: StoreReply(body=json.dumps(reported).encode())
    error = refused("hf://org/name", tmp_path, {"HF_ENDPOINT": store.url})
    assert "never read" in str(error)


# -- S3

KEY = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
SPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def s3(store: Store, *, page: int = 2, etags: bool = True) -> None:
    objects = {f"models/tiny/{name}": content for name, content in {**FILES, **NOISE}.items()}

    def answer(requested: StoreRequest) -> StoreReply | None:
        if "Credential=AKID/" not in requested.headers.get("authorization", ""):
            return StoreReply(403)
        if "list-type" not in requested.query:
            return None
        keys = sorted(key for key in objects if key.startswith(requested.query.get("prefix", "")))
        begin = int(requested.query.get("continuation-token", 0))
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(objects[key])}</Size>"
            + (f'<ETag>"{hashlib.md5(objects[key]).hexdigest()}"</ETag>' if etags else "")
            + "</Contents>"
            for key in keys[begin : begin + page]
        )
        if begin + page < len(keys):
            rows += f"<NextContinuationToken>{begin + page}</NextContinuationToken>"
        text = f'<?xml version="1.0"?><ListBucketResult xmlns="{SPACE}">{rows}</ListBucketResult>'
        return StoreReply(body=text.encode())

    store.routes["/bucket"] = answer
    store.files |= {f"/bucket/{key}": content for key, content in objects.items()}


def test_s3_lists_page_by_page_and_signs(store, tmp_path):
    s3(store)
    mark = run("s3://bucket/models/tiny", tmp_path, {"AWS_ENDPOINT_URL": store.url, **KEY})

    assert_whole(tmp_path, mark)
    assert all("x-amz-date" in requested.headers for requested in store.requested)


def test_one_object_of_s3(store, tmp_path):
    s3(store)
    store.files["/bucket/models/tiny/model.safetensors"] = WEIGHTS
    uri = "s3://bucket/models/tiny/model.safetensors"
    mark = run(uri, tmp_path, {"AWS_ENDPOINT_URL": store.url, **KEY})
    assert [file.size for file in mark.files] == [len(WEIGHTS)]


def test_s3_s_md5_is_believed_unless_the_object_is_encrypted_by_a_key(store, tmp_path):
    s3(store)
    path = "/bucket/models/tiny/model.safetensors"
    store.files[path] = WEIGHTS[::-1]
    environ = {"AWS_ENDPOINT_URL": store.url, **KEY}
    error = refused("s3://bucket/models/tiny", tmp_path / "a", environ)
    assert error.reason is FetchReason.DIGEST_MISMATCH and "MD5" in str(error)

    encrypted = {"x-amz-server-side-encryption": "aws:kms"}
    store.routes[path] = lambda requested: StoreReply(blob=WEIGHTS[::-1], headers=encrypted)
    store.routes = dict(reversed(store.routes.items()))
    run("s3://bucket/models/tiny", tmp_path / "b", environ)
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == WEIGHTS[::-1]


NEVER = "2999-01-01T00:00:00Z"


def test_s3_with_the_role_of_the_pod_s_service_account(store, tmp_path):
    """IRSA: a webhook sets the variables, and the token's file changes from time to time."""
    s3(store)
    forms: list[str] = []

    def assume(requested: StoreRequest) -> StoreReply:
        forms.append(requested.body.decode())
        keys = "<AccessKeyId>AKID</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
        more = f"<SessionToken>session</SessionToken><Expiration>{NEVER}</Expiration>"
        return StoreReply(body=f"<R><Credentials>{keys}{more}</Credentials></R>".encode())

    store.routes["/sts/"] = assume
    (tmp_path / "token").write_text("of-the-pod\n")
    environ = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ENDPOINT_URL_STS": f"{store.url}/sts",
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/models",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert_whole(tmp_path / "to", run("s3://bucket/models/tiny", tmp_path / "to", environ))
    assert len(forms) == 1, "asked for once"
    assert "WebIdentityToken=of-the-pod" in forms[0] and "role%2Fmodels" in forms[0]
    signed = [a for a in store.requested if a.path.startswith("/bucket")]
    assert {a.headers["x-amz-security-token"] for a in signed} == {"session"}


def test_a_role_that_aws_refuses_is_said(store, tmp_path):
    s3(store)
    store.routes["/sts/"] = lambda requested: StoreReply(
        403, body=b"<E><Message>not you</Message></E>"
    )
    (tmp_path / "token").write_text("t")
    environ = {
        "AWS_ENDPOINT_URL": store.url, "AWS_ENDPOINT_URL_STS": f"{store.url}/sts",
        "AWS_ROLE_ARN": "arn:a", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
    }  # fmt: skip
    error = refused("s3://bucket/models/tiny", tmp_path / "to", environ)
    assert error.reason is FetchReason.UNAUTHORIZED
    assert str(error).startswith("AWS refuses the role arn:a: not you")


def test_s3_with_eks_pod_identity(store, tmp_path):
    s3(store)

    def keys(requested: StoreRequest) -> StoreReply:
        if requested.headers.get("authorization") != "of-the-pod":
            return StoreReply(401)
        reported = {
            "AccessKeyId": "AKID",
            "SecretAccessKey": "s",
            "Token": "x",
            "Expiration": NEVER,
        }
        return StoreReply(body=json.dumps(reported).encode())

    store.routes["/v1/credentials"] = keys
    (tmp_path / "token").write_text("of-the-pod")
    environ = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{store.url}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert_whole(tmp_path / "to", run("s3://bucket/models/tiny", tmp_path / "to", environ))
    (tmp_path / "token").write_text("of-another")
    error = refused("s3://bucket/models/tiny", tmp_path / "b", environ)
    assert "associate a role with the pod's ServiceAccount" in str(error)


@pytest.mark.parametrize("host", ["169.254.169.254", "example.com", "10.0.0.1"])
def test_keys_are_asked_of_nobody_else(store, tmp_path, host):
    """The pod's token must not go to a machine's metadata, nor in clear text over a network."""
    environ = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{host}/v1/credentials",
    }
    error = refused("s3://bucket/models/tiny", tmp_path, environ)
    assert "is not EKS' agent" in str(error)


@pytest.mark.parametrize(
    ("uri", "environ", "reason"),
    [
        ("s3://bucket/models/tiny", {}, FetchReason.UNAUTHORIZED),
        ("s3://bucket/models/none", KEY, FetchReason.NOT_FOUND),
        ("s3://bucket/models/none.gguf", KEY, FetchReason.NOT_FOUND),
        ("s3://other/models", KEY, FetchReason.NOT_FOUND),
        ("s3://../models", KEY, FetchReason.FAILED),
    ],
)
def test_s3_s_refusals(store, tmp_path, uri, environ, reason):
    s3(store)
    assert refused(uri, tmp_path, {"AWS_ENDPOINT_URL": store.url, **environ}).reason is reason


def test_a_listing_with_declarations_is_not_parsed(store, tmp_path):
    bomb = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>'
    store.routes["/"] = lambda requested: StoreReply(body=bomb)
    error = refused("s3://bucket/m", tmp_path, {"AWS_ENDPOINT_URL": store.url})
    assert "no listing" in str(error)


# -- Google Cloud Storage


def gcs(store: Store, *, token: str = "") -> None:
    def answer(requested: StoreRequest) -> StoreReply:
        if token and requested.headers.get("authorization") != f"Bearer {token}":
            return StoreReply(401)
        _, _, name = requested.path.partition("/o/")
        if name:
            content = FILES[unquote(name).removeprefix("tiny/")]
            return (
                StoreReply(blob=content)
                if requested.query.get("generation") == "7"
                else StoreReply(404)
            )
        items = [
            {
                "name": f"tiny/{name}", "size": str(len(content)), "generation": "7",
                "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            }
            for name, content in sorted(FILES.items())
        ]  # fmt: skip
        at = int(requested.query.get("pageToken", 0))
        page: dict[str, Any] = {"items": items[at : at + 2]}
        if at + 2 < len(items):
            page["nextPageToken"] = str(at + 2)
        return StoreReply(body=json.dumps(page).encode())

    store.routes["/storage/v1/b/bucket/o"] = answer


# Made for this test, and used nowhere.
PRIVATE_KEY = (
    "MIICeAIBADANBgkqhkiG9w0BAQEFAASCAmIwggJeAgEAAoGBAJghIHpffFhHH/PLE+vXHeXifG6u/cFaAdHo/zK1"
    "D8kkrw3QmxxJ/5As6BJeY0ZnvSj72nw1RLvirq0Lw8PiSvOK9nkgbjuxEpwCaOjRgCg3Wzru1tUoMVOgsEOefi/m"
    "9TvJuzQ+T3+X6NKdzP1G382MhMHH8389u0NdWRZuFiZVAgMBAAECgYBNvxhPEf+FSgwdVtq+e7iu5Jm9IzdSGkK1"
    "2UKa0ofXvySrhcHPqk2ujBSqVoybzaaRjGzzb3HKJ6Ynj8yjjkHI/bSlSKqtQsIRPIBfz2tGKStaLQ49JKCqUoje"
    "t0BoyfTHIPTX5eK1yQTXCb/FqriKbce0MuTTs8cKsNcGvzGW3QJBAMVhbNFTOnvezluRIKeK52U2oD8C1zOXSG6N"
    "R4OjajDK78ply1smq/FeEMTSHVgYoQFjFwvJDrkyXPMKthAlwi8CQQDFT1FJx0G1AUPp3PQ+saKnITU7py9ZGyn"
    "ziSzK17bzDFGf/X8fwGm3G6zoZ+Gt5jxPMOhzaH3bw1hwsry+RhK7AkEAhfcfBWAI5MQPqWRyFmUXssGFt960s2Z"
    "tmeM386e5Tk6eu++lO0OfFh5zITM/CWkF9kwL+0rGPHprTeYqNgF6rwJBAKmHyzpvID/bxHSOSrYLfsvHNqv4rDA"
    "NrO/5bykiS6ltbjzfXHj1pF+WQey2RSxb5HnOdgujPnCy2ayLhqyeHL0CQQCf4NfdczDuYWGDtd0ubn1wbLOsBzC"
    "VJGa7d0OgruJim0WLpzYHKNp3rTrEkYwD2KyiCHcL0R/2AlGIVE6sAoOx"
)
PEM = f"-----BEGIN {'PRIVATE'} KEY-----\n{PRIVATE_KEY}\n-----END {'PRIVATE'} KEY-----\n"
# `openssl dgst -sha256 -sign` of "octavo" with it.
SIGNED = (
    "HMYciFkmORhkCYE3JgtRUsx1jGc8jyJbiH/wwyGtmZJvimQ1D3ZxEZ5VcRjHRlWiAWjzYWpkWHk1HqIzlTRBORSn"
    "+bmrVk5aNblWu1RMmS4yAEJf9WDSk+jRNM9CV9cc/nQxDs3+c3aKaTfy/W4A2eK8xwv9GjvSdm599fzOZwQ="
)


def test_rs256_signs_as_openssl_does():
    assert base64.b64encode(sign_rs256(PEM, b"octavo")).decode() == SIGNED


@pytest.mark.parametrize("pem", ["", "-----BEGIN X-----\n!!\n", "AAAA", PEM[:300]])
def test_what_is_no_key_is_said(pem):
    with pytest.raises(FetchError, match="is not an RSA key"):
        assertion({"client_email": "a@b", "private_key": pem}, now=0)


def test_gcs_with_the_key_of_a_service_account(store, tmp_path):
    gcs(store, token="granted")
    forms: list[str] = []

    def grant(requested: StoreRequest) -> StoreReply:
        forms.append(requested.body.decode())
        return StoreReply(body=b'{"access_token": "granted", "expires_in": 3600}')

    store.routes["/token"] = grant
    key = {
        "type": "service_account", "client_email": "a@b.example", "private_key": PEM,
        "token_uri": f"{store.url}/token",
    }  # fmt: skip
    (tmp_path / "key.json").write_text(json.dumps(key))
    environ = {
        "STORAGE_EMULATOR_HOST": store.url,
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json"),
    }
    assert_whole(tmp_path / "to", run("gs://bucket/tiny", tmp_path / "to", environ))
    assert len(forms) == 1 and "grant-type%3Ajwt-bearer" in forms[0]


def test_gcs_with_the_machine_s_own_account(store, tmp_path):
    gcs(store, token="of-machine")
    store.routes["/computeMetadata/"] = lambda requested: (
        StoreReply(body=b'{"access_token": "of-machine", "expires_in": 60}')
        if requested.headers.get("metadata-flavor") == "Google"
        else StoreReply(403)
    )
    environ = {
        "STORAGE_EMULATOR_HOST": store.url,
        "GCE_METADATA_HOST": store.url.removeprefix("http://"),
    }
    assert_whole(tmp_path, run("gs://bucket/tiny", tmp_path, environ))


def test_gcs_of_everybody_needs_no_credentials(store, tmp_path):
    gcs(store)
    environ = {"STORAGE_EMULATOR_HOST": store.url, "GCE_METADATA_HOST": "127.0.0.1:9"}
    assert_whole(tmp_path, run("gs://bucket/tiny", tmp_path, environ))


def test_gcs_that_wants_credentials_says_which(store, tmp_path):
    gcs(store, token="x")
    environ = {"STORAGE_EMULATOR_HOST": store.url, "GCE_METADATA_HOST": "127.0.0.1:9"}
    error = refused("gs://bucket/tiny", tmp_path, environ)
    assert error.reason is FetchReason.UNAUTHORIZED and "GOOGLE_APPLICATION_CREDENTIALS" in str(
        error
    )


# -- OCI


def sha(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def oci(store: Store, *, wants: str = "") -> str:
    """The digest of the manifest. `wants`: bearer or basic."""
    layers = [
        {
            "digest": sha(content), "size": len(content),
            "annotations": {"org.opencontainers.image.title": name},
        }
        for name, content in {**FILES, **NOISE}.items()
    ]  # fmt: skip
    manifest = json.dumps({"schemaVersion": 2, "layers": layers}).encode()
    kind = "application/vnd.oci.image.index.v1+json"
    index = json.dumps({"mediaType": kind, "manifests": [{"digest": sha(manifest)}]}).encode()
    proof = {"bearer": "Bearer granted", "basic": "Basic dXNlcjpwYXNz"}.get(wants, "")

    def answer(requested: StoreRequest) -> StoreReply | None:
        if proof and requested.headers.get("authorization") != proof:
            bearer = f'Bearer realm="{store.url}/token",service="s",scope="repository:org/m:pull"'
            challenge = bearer if wants == "bearer" else 'Basic realm="r"'
            return StoreReply(401, headers={"www-authenticate": challenge})
        reference = requested.path.rpartition("/")[2]
        known = {"v1": index, sha(index): index, sha(manifest): manifest}
        if "/manifests/" in requested.path:
            return StoreReply(body=known[reference]) if reference in known else StoreReply(404)
        return None

    store.routes["/v2/org/m/"] = answer
    store.routes["/token"] = lambda requested: (
        StoreReply(body=b'{"token": "granted"}')
        if requested.headers.get("authorization") == "Basic dXNlcjpwYXNz"
        and requested.query["scope"] == "repository:org/m:pull"
        else StoreReply(401)
    )
    for content in {**FILES, **NOISE}.values():
        store.files[f"/v2/org/m/blobs/{sha(content)}"] = content
    return sha(index)


@pytest.mark.parametrize("wants", ["", "bearer", "basic"])
def test_an_artifact_is_fetched_by_tag(store, tmp_path, wants):
    digest = oci(store, wants=wants)
    host = store.url.removeprefix("http://")
    environ = {"OCI_USERNAME": "user", "OCI_PASSWORD": "pass"} if wants else {}
    mark = run(f"oci://{host}/org/m:v1", tmp_path, environ, digest=digest)

    assert_whole(tmp_path, mark)
    assert (mark.revision, mark.digest) == (digest, digest)


def test_a_docker_configuration_opens_a_registry(store, tmp_path):
    oci(store, wants="bearer")
    host = store.url.removeprefix("http://")
    secret = tmp_path / "secret"
    secret.mkdir()
    auths = {"auths": {host: {"username": "user", "password": "pass"}}}
    (secret / ".dockerconfigjson").write_text(json.dumps(auths))
    environ = {"OCTAVO_CREDENTIALS": str(secret)}
    assert_whole(tmp_path / "to", run(f"oci://{host}/org/m:v1", tmp_path / "to", environ))


def test_an_artifact_is_fetched_by_digest_and_nothing_else_passes_for_it(store, tmp_path):
    digest = oci(store)
    host = store.url.removeprefix("http://")
    assert_whole(tmp_path / "a", run(f"oci://{host}/org/m@{digest}", tmp_path / "a", {}))

    store.routes["/v2/org/m/"] = lambda requested: StoreReply(body=b"{}")
    error = refused(f"oci://{host}/org/m@{digest}", tmp_path / "b", {})
    assert error.reason is FetchReason.DIGEST_MISMATCH


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("org/m:none", FetchReason.NOT_FOUND),
        (f"org/m@sha256:{'0' * 64}", FetchReason.REVISION_NOT_FOUND),
        ("org/../m:v1", FetchReason.FAILED),
    ],
)
def test_a_registry_s_refusals(store, tmp_path, reference, reason):
    oci(store)
    host = store.url.removeprefix("http://")
    assert refused(f"oci://{host}/{reference}", tmp_path, {}).reason is reason


def test_an_image_is_no_artifact(store, tmp_path):
    layers = [{"digest": sha(b"tar"), "size": 3}]
    store.routes["/v2/"] = lambda requested: StoreReply(
        body=json.dumps({"layers": layers}).encode()
    )
    host = store.url.removeprefix("http://")
    assert "never unpacked" in str(refused(f"oci://{host}/org/m:v1", tmp_path, {}))


# -- this machine


def test_a_folder_is_copied_without_what_is_not_the_model_s(tmp_path):
    source = tmp_path / "from"
    source.mkdir()
    for name, content in {**FILES, **NOISE}.items():
        if "/" not in name:
            (source / name).write_bytes(content)
    assert_whole(tmp_path / "to", run(f"file://{source}", tmp_path / "to", {}))


def test_the_demo_model_is_found(tmp_path):
    mark = run("demo://smollm2", tmp_path, {})
    assert len(mark.files) == 1 and mark.files[0].name.endswith(".gguf")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///no/such/model", FetchReason.NOT_FOUND),
        ("demo://none", FetchReason.NOT_FOUND),
        ("pvc://claim/x", FetchReason.NOT_FOUND),
        ("ftp://host/x", FetchReason.FAILED),
        ("org/name", FetchReason.FAILED),
    ],
)
def test_what_is_not_here_is_said(tmp_path, uri, reason):
    assert refused(uri, tmp_path, {}).reason is reason
