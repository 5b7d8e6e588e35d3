"""What a key may look like, for every store alike: names that come from outside must not lead out of the store."""

from __future__ import annotations

# Names that start so are files in the making; no key may, and no listing shows them.
TEMPORARY = ".tmp-"


def check_key(key: str) -> str:
    """The key itself if it is safe. Names are checked at the edges; a bad key here is a bug, hence ValueError."""
    for segment in key.split("/"):
        if segment in ("", ".", "..") or segment.startswith(TEMPORARY) or "\\" in segment or not segment.isprintable():
            raise ValueError(f"not a valid key: {key!r}")
    return key


def check_removable(key: str) -> str:
    """The key itself if it leads nowhere else. What somebody planted under an impossible name may still be removed."""
    for segment in key.split("/"):
        if segment in ("", ".", "..") or segment.startswith(TEMPORARY):
            raise ValueError(f"not a valid key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself if its folder is safe to look into; the name after the last slash may be incomplete."""
    folder, slash, _ = prefix.rpartition("/")
    if slash:
        check_key(folder)
    return prefix
