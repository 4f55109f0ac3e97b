"""Fetches a model from the Hugging Face Hub, or finds it in the hub's cache."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.errors import ModelError, NoSuchModel
from octavo_engine.weights.gguf_parts import all_parts, missing_parts, models_among

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Never pickles, and no Python of a repository unless that is wanted.
_TOKENIZER = [
    "tokenizer*.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
]
MODEL = (*_TOKENIZER, "*.safetensors", "*.safetensors.index.json")
IGNORED = ("*/*", "consolidated*")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FILE = r"[\w.-]+\.gguf"
# The file may stand before the revision or after it; people write both.
_REPOSITORY = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    rf"(?:@(?P<first_rev>\S+?)/(?P<last_file>{_FILE})|(?:/(?P<file>{_FILE}))?(?:@(?P<rev>\S+))?)"
)


class HubName(NamedTuple):
    """What a reference says."""

    repo: str
    file: str  # a .gguf, or ""
    revision: str | None


def parse_name(reference: str, revision: str | None = None) -> HubName:
    """Of hf://…, without the scheme. Raises ModelError."""
    match = _REPOSITORY.fullmatch(reference)
    if match is None or ".." in reference:
        raise ModelError(
            f"hf://{reference:.200} is not of the form hf://ORG/NAME[/FILE.gguf][@REV]"
        )
    own = match["rev"] or match["first_rev"]
    if own and revision and own != revision:
        raise ModelError(f"{reference} names revision {own}, --revision {revision}")
    return HubName(match["repo"], match["file"] or match["last_file"] or "", own or revision)


def is_repository(reference: str) -> bool:
    """Whether it is written as ORG/NAME, with a .gguf file and @REV at will."""
    return _REPOSITORY.fullmatch(reference) is not None and ".." not in reference


def download(
    reference: str,
    revision: str | None,
    *,
    download_dir: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    tokenizer_only: bool = False,
    with_code: bool = False,
) -> Path:
    """The snapshot's folder, or the one .gguf, with all its parts. HF_HUB_OFFLINE and HF_TOKEN
    count, and HF_HOME without a `download_dir`."""
    repo, file, wanted = parse_name(reference, revision)
    fetch = _Fetch(repo, wanted, download_dir, progress)
    if file:
        return fetch.file(file)
    folder = fetch.snapshot(
        _TOKENIZER if tokenizer_only else [*MODEL, *(["*.py"] if with_code else [])]
    )
    if tokenizer_only or any(folder.glob("*.safetensors")):
        return folder
    return fetch.only_gguf(folder)


def adapter_folders(repo: str, revision: str | None) -> set[str] | None:
    """Folders of a repository that hold a LoRA adapter; "" is the uppermost. None: it cannot be
    known, as HF_HUB_OFFLINE is set. Raises ModelError."""
    return _Fetch(repo, revision, None, None).folders_with(ADAPTER[0])


def download_adapter(
    repo: str, revision: str | None, folder: str, *, download_dir: str | None = None
) -> Path:
    """The folder of an adapter on this machine. Raises ModelError."""
    fetch = _Fetch(repo, revision, download_dir, None)
    return fetch.snapshot([f"{folder}/{name}".lstrip("/") for name in ADAPTER], ignored=()) / folder


class _Fetch:
    """One repository at one revision; every call translates the hub's errors."""

    def __init__(
        self,
        repo: str,
        revision: str | None,
        download_dir: str | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._repo = repo
        self._revision = revision
        self._download_dir = download_dir
        self._progress = progress

    def folders_with(self, name: str) -> set[str] | None:
        import huggingface_hub
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return None
        listed = self._call(huggingface_hub.HfApi().list_repo_files)
        found = [folder for folder, _, last in (n.rpartition("/") for n in listed) if last == name]
        return set(found)

    def snapshot(self, patterns: list[str], ignored: Sequence[str] = IGNORED) -> Path:
        import huggingface_hub

        return Path(
            self._call(
                huggingface_hub.snapshot_download,
                allow_patterns=patterns,
                ignore_patterns=list(ignored),
                **self._options(),
            )
        )

    def file(self, name: str) -> Path:
        """The file, or the first part of its model when all parts are there."""
        import huggingface_hub

        parts = all_parts(name)
        if len(parts) > 1:  # of one commit, which calls of their own would not promise
            folder = self.snapshot(list(parts))
            if missing := [part for part in parts if not (folder / part).exists()]:
                raise ModelError(missing_parts(missing, len(parts), self._repo))
            return folder / parts[0]
        return Path(self._call(huggingface_hub.hf_hub_download, filename=name, **self._options()))

    def only_gguf(self, folder: Path) -> Path:
        """The repository has no safetensors: its single .gguf, or a list to choose from."""
        import huggingface_hub

        if huggingface_hub.constants.HF_HUB_OFFLINE:
            names = models_among(path.name for path in folder.glob("*.gguf"))
        else:
            listed = self._call(huggingface_hub.HfApi().list_repo_files)
            names = models_among(n for n in listed if n.endswith(".gguf") and "/" not in n)
        if len(names) == 1:
            return self.file(names[0])
        if names:
            choice = ", ".join(f"hf://{self._repo}/{name}" for name in names[:20])
            raise ModelError(f"{self._repo} has several .gguf files; name one: {choice}")
        raise ModelError(
            f"{self._repo} has no *.safetensors and no .gguf; "
            "pickled weights (.bin, .pt) are never read: convert them to safetensors"
        )

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._download_dir is not None:
            options["cache_dir"] = self._download_dir
        if self._progress is not None:
            options["tqdm_class"] = _reporting(self._progress)
        return options

    def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        from huggingface_hub import errors

        where = self._repo + (f"@{self._revision}" if self._revision else "")
        try:
            return function(repo_id=self._repo, revision=self._revision, **arguments)
        except errors.GatedRepoError:
            raise ModelError(
                f"{where} is gated: accept its licence at https://huggingface.co/{self._repo} "
                "and set HF_TOKEN to a token of that account"
            ) from None
        except errors.RevisionNotFoundError:
            raise NoSuchModel(f"{self._repo} has no revision {self._revision}") from None
        except errors.RepositoryNotFoundError:
            raise NoSuchModel(
                f"{where} is not on the hub, or is private: check the name, "
                "or set HF_TOKEN to a token that may read it"
            ) from None
        except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
            raise ModelError(
                f"{where} is not in the local cache and the hub cannot be reached "
                "(or HF_HUB_OFFLINE is set): download it once while online, or name a local folder"
            ) from None
        except errors.EntryNotFoundError:
            raise NoSuchModel(f"{where} has no file {arguments.get('filename')}") from None
        except errors.HFValidationError as error:
            raise NoSuchModel(f"{where} is not a valid name on the hub: {error}") from None
        except errors.HfHubHTTPError as error:
            raise ModelError(f"{where} could not be fetched: {_status(error)}") from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ModelError(
                    f"the disk is full while fetching {where}; free some space, or let "
                    "--download-dir or HF_HOME name a folder on a larger disk"
                ) from error
            raise ModelError(f"{where} could not be fetched: {error}") from error


def _status(error: Any) -> str:
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        return f"the hub answers {status}; set HF_TOKEN to a token that may read it"
    return f"the hub answers {status}" if status else str(error)


def _reporting(progress: Callable[[int, int], None]) -> type:
    """A tqdm that draws nothing and reports bytes instead."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs |= {"disable": False, "file": _Nowhere()}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self._counts_bytes:
                progress(int(self.n), int(self.total or 0))
            return drawn

    return Reporting


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
