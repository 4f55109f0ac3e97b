"""What is wrong with a bundle, or with the place that it is loaded into."""

from __future__ import annotations

from octavo_engine.errors import OctavoError


class BundleError(OctavoError):
    """One sentence with what to do."""
