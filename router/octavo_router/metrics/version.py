"""Which version of Octavo this is, as it was installed."""

from __future__ import annotations


def installed_version() -> str:
    from importlib import metadata  # takes as long as a tenth of the router's start

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
