"""Models of the Hugging Face Hub. Which files count is the engine's own rule for hf://."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from octavo.fetch.errors import FetchError, FetchReason, of_status
from octavo.fetch.source import RemoteFile, SourceListing, choose, parts_of
from octavo_common.remote.http import json_object
from octavo_engine.errors import ModelError
from octavo_engine.weights.hub import parse_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http

_ENDPOINT = "https://huggingface.co"
_HINT = "set HF_TOKEN to a token that may read it"


class HuggingFaceHub:
    """`location`: ORG/NAME, with a .gguf file and @REV at will."""

    def __init__(self, location: str, revision: str, http: Http, credentials: Credentials) -> None:
        try:
            self._name = parse_name(location, revision or None)
        except ModelError as error:
            raise FetchError(FetchReason.FAILED, str(error)) from None
        self._http = http
        self._endpoint = (credentials.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        self._token = credentials.get("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

    def find(self) -> SourceListing:
        """Everything is taken from one commit, whatever a branch does meanwhile."""
        info = self._info()
        commit = info.get("sha")
        siblings = info.get("siblings")
        if not isinstance(commit, str) or not commit.isalnum() or not isinstance(siblings, list):
            raise FetchError(FetchReason.FAILED, f"{self._endpoint} does not answer as a hub does")
        by_name = {
            str(each["rfilename"]): each
            for each in siblings
            if isinstance(each, dict) and isinstance(each.get("rfilename"), str)
        }
        repo, file, _ = self._name
        names = parts_of(file, by_name, repo) if file else choose(by_name, repo)
        return SourceListing(tuple(self._file(by_name[name], commit) for name in names), commit)

    def _info(self) -> dict[str, Any]:
        repo, _, revision = self._name
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision or 'main', safe='')}"
        with self._http.open(f"{url}?blobs=true", sign=self._sign) as answer:
            if answer.status == 200:
                return json_object(answer.text(), url)
            status, code = answer.status, answer.headers.get("x-error-code", "")
            after_s = answer.retry_after_s
        if code == "GatedRepo":
            raise FetchError(
                FetchReason.UNAUTHORIZED,
                f"{repo} is gated: accept its licence at {self._endpoint}/{repo} and set HF_TOKEN "
                "to a token of that account",
            )
        if code == "RevisionNotFound":
            raise FetchError(
                FetchReason.REVISION_NOT_FOUND, f"{repo} has no revision {revision}; check its name"
            )
        if code == "RepoNotFound" and self._token:
            raise FetchError(
                FetchReason.NOT_FOUND, f"{repo} is not on the hub, or HF_TOKEN may not see it"
            )
        raise of_status(status, repo, hint=f"check the name, and {_HINT}", after_s=after_s)

    def _file(self, sibling: dict[str, Any], commit: str) -> RemoteFile:
        name, size = str(sibling["rfilename"]), sibling.get("size")
        large = sibling.get("lfs")
        digest = large.get("sha256") if isinstance(large, dict) else None
        return RemoteFile(
            name,
            f"{self._endpoint}/{self._name.repo}/resolve/{commit}/{quote(name)}",
            size=size if isinstance(size, int) else None,
            sha256=str(digest or ""),
            sign=self._sign,
            hint=_HINT,
        )

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}
