"""Reads the pictures and sounds of requests from wherever the operator allows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo_engine.core.media.fetch import PictureFetcher
from octavo_engine.core.media.local_files import LocalPictures
from octavo_engine.core.media.sources import read_data_url, unfetched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.budget import ByteBudget
    from octavo_engine.models.vision_config import MediaKind


class PictureSources:
    """data: URLs always; https: and file: URLs where hosts and a folder are allowed."""

    def __init__(self, hosts: Sequence[str], folder: str) -> None:
        self._fetcher = PictureFetcher(hosts) if hosts else None
        self._files = LocalPictures(folder) if folder else None

    async def read(
        self, url: str, param: str, budget: ByteBudget, kind: MediaKind = "image"
    ) -> bytes:
        """Raises RequestError that names `param`."""
        scheme = url.partition(":")[0].lower()
        if scheme == "https":
            if self._fetcher is None:
                raise unfetched(scheme, param, "--allowed-media-domains", kind=kind)
            return await self._fetcher.fetch(url, param, budget, kind)
        if scheme == "file":
            if self._files is None:
                raise unfetched(scheme, param, "--allowed-local-media-path", kind=kind)
            return await asyncio.to_thread(self._files.read, url, param, budget)
        return read_data_url(url, param, kind)
