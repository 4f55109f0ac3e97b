"""A secret that hosts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.shared_secret import new_nonce, proof, proves, read_secret

if TYPE_CHECKING:
    from pathlib import Path


def test_a_proof_holds_for_its_side_and_nonces_only() -> None:
    given = proof(b"s", "server", "1", "2")
    assert proves(given, b"s", "server", "1", "2")
    for other in (
        (b"t", "server", "1", "2"),
        (b"s", "client", "1", "2"),
        (b"s", "server", "2", "1"),
    ):
        assert not proves(given, *other)


def test_nonces_differ() -> None:
    assert len({new_nonce() for _ in range(100)}) == 100


def test_a_file_is_read_without_the_space_around(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  sixteen bytes or more\n")
    assert read_secret(str(file), "--key") == b"sixteen bytes or more"


def test_a_short_or_missing_file_is_refused_by_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=f"--key {file} cannot be read: No such file"):
        read_secret(str(file), "--key")
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match=f"--key {file} must have at least 16 bytes; it has 5"):
        read_secret(str(file), "--key")
