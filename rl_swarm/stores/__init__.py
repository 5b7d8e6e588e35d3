"""Where a swarm meets. `open_store` turns the address a user gives into a store."""

from __future__ import annotations

from pathlib import Path

from rl_swarm.errors import SettingsError
from rl_swarm.protocols import Store
from rl_swarm.stores.folder import FolderStore


def open_store(address: str, *, create: bool = False) -> Store:
    """The store behind a folder's path. With `create`, the last folder of the path may be missing."""
    scheme, separator, _ = address.partition("://")
    if separator:
        raise SettingsError(
            f"GDRIVE_PATH={address!r} is not allowed: this version has no store for {scheme}://; give a folder."
        )
    return FolderStore(Path(address).expanduser(), create=create)
