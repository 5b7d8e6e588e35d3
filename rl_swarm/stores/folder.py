"""A store in a folder: a disk, a network share, a mounted drive.

A value becomes visible whole or not at all: it is written to a temporary file in the same folder, forced to disk and
renamed. A create-only write links the temporary file to its name, which fails if the name exists; where links are
refused it renames too, while it holds a second, hidden name that only one writer can make.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from rl_swarm.errors import KeyExists, KeyMissing, MalformedRecord, StoreUnavailable
from rl_swarm.stores.keys import TEMPORARY, check_key, check_prefix, check_removable

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "it is mounted read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOENT: "it does not exist (is the drive mounted?)",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EEXIST: "a file stands where a folder should be",
    errno.EISDIR: "a folder stands where a file should be",
    errno.ELOOP: "a link stands where a file should be",
    errno.ENXIO: "a pipe stands where a file should be",
    errno.EIO: "the device reports an input/output error",
    errno.ESTALE: "the network share went away",
    errno.ENOTCONN: "the mount is disconnected",
}
# A write takes moments. What is older by the file system's own clock was left by a writer that was killed.
ABANDONED_SECONDS = 3600.0
RACES_LOST = 10
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EIO}


class FolderStore:
    """`durable=False` skips forcing each file to disk: faster, and safe against everything but a power cut."""

    def __init__(self, root: Path, *, create: bool = False, durable: bool = True) -> None:
        self._root = root
        self._durable = durable
        self._repaired: set[str] = set()
        if create:
            with self._explained("create"):
                root.mkdir(exist_ok=True)
        if not root.is_dir():
            raise StoreUnavailable(f"The folder {root} does not exist (is the drive mounted, the name right?).")

    def get(self, key: str, limit: int | None = None) -> bytes:
        try:
            # Neither a link to elsewhere nor a pipe that never ends may stand in for a file.
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root("read")
            raise KeyMissing(f"{key} is not in {self._root}.") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise MalformedRecord("not_a_file", key) from None
            if error.errno in (errno.EACCES, errno.EPERM) and os.access(self._root, os.R_OK | os.X_OK):
                # One file that its owner keeps to himself is his fault, not the store's: nobody must wait for it.
                raise MalformedRecord("no_permission", key) from None
            raise self._explain(error, "read") from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise MalformedRecord("not_a_file", key)
        with os.fdopen(descriptor, "rb") as file, self._explained("read"):
            if limit is not None and found.st_size > limit:
                raise MalformedRecord("too_large", f"{found.st_size} bytes")
            # Not `read(limit)`: it would set aside that many bytes first, a gigabyte for a log of three lines.
            return file.read(found.st_size)

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with self._explained("write"), self._temporary(path, value) as temporary:
            os.replace(temporary, path)

    def create(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with self._explained("write"), self._temporary(path, value) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise KeyExists(f"{key} is already in {self._root}.") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._create_without_link(temporary, path, key)

    def _create_without_link(self, temporary: Path, path: Path, key: str) -> None:
        claim = path.parent / f"{TEMPORARY}{path.name}"
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            if not _is_abandoned(claim, temporary.stat().st_mtime):
                raise KeyExists(f"{key} is being made by somebody else in {self._root}.") from None
            claim.touch()  # its maker was killed: taken over
        try:
            if os.path.lexists(path):
                raise KeyExists(f"{key} is already in {self._root}.")
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                claim.unlink(missing_ok=True)

    def append(self, key: str, line: bytes) -> None:
        path = self._path(key)
        with self._explained("write"):
            self._make_parent(path)
            # Unbuffered: after a failed write nothing is left over that closing the file would try to write again.
            with open(path, "ab", buffering=0, opener=_open_to_append) as file:
                size = file.tell()
                if key not in self._repaired:
                    size = _whole_lines(path, size)
                    file.truncate(size)
                    self._repaired.add(key)
                data = line + b"\n"
                try:
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, "short write")
                    if self._durable:
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise

    def keys(self, prefix: str, *, shallow: bool = False) -> list[str]:
        folder, _, start = check_prefix(prefix).rpartition("/")
        top = self._root / folder if folder else self._root
        found: list[str] = []

        def fail(error: OSError) -> None:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise error

        with self._explained("list"):
            for parent, folders, files in os.walk(top, onerror=fail):
                if Path(parent) == top:
                    folders[:] = [name for name in folders if name.startswith(start)]
                    files = [name for name in files if name.startswith(start)]
                relative = Path(parent).relative_to(self._root)
                found += [(relative / name).as_posix() for name in files if not name.startswith(TEMPORARY)]
                if shallow:
                    found += [f"{(relative / name).as_posix()}/" for name in folders]
                    break
        if not found:
            self._check_root("list")
        return sorted(found)

    def delete(self, key: str) -> None:
        path = self._root / check_removable(key)
        with self._explained("delete"):
            path.unlink(missing_ok=True)
        self._check_root("delete")
        self._remove_empty_parents(path)

    def move(self, key: str, target: str) -> None:
        path, goal = self._path(key), self._path(target)
        with self._explained("move"):
            self._make_parent(goal)
            try:
                os.replace(path, goal)
            except FileNotFoundError:
                self._remove_empty_parents(goal)
                raise KeyMissing(f"{key} is not in {self._root}.") from None
        self._remove_empty_parents(path)

    def _remove_empty_parents(self, path: Path) -> None:
        """A folder without keys is no folder: listings must not name it, a deleted experiment leaves nothing behind."""
        with suppress(OSError):
            for parent in path.parents:
                if parent == self._root:
                    break
                # What killed writers left in the making goes with its folder, once it is too old to be in use. Its age
                # is told by the folder's own clock: something in it was changed a moment ago.
                now = parent.stat().st_mtime
                left = list(parent.iterdir())
                if all(entry.name.startswith(TEMPORARY) and _is_abandoned(entry, now) for entry in left):
                    for entry in left:
                        entry.unlink()
                parent.rmdir()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _make_parent(self, path: Path) -> None:
        # Never re-create the root: a drive that came unmounted would be replaced by a folder on the local disk.
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "missing")
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _temporary(self, path: Path, value: bytes) -> Iterator[Path]:
        temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            with self._opened_new(temporary) as file:
                file.write(value)
                self._force(file)
            yield temporary
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _opened_new(self, path: Path) -> BufferedWriter:
        """A new file, in a folder that somebody may be removing as empty at this very moment."""
        for _ in range(RACES_LOST):
            with suppress(FileNotFoundError, FileExistsError):
                self._make_parent(path)
                return open(path, "wb")
        self._make_parent(path)
        return open(path, "wb")

    def _force(self, file: BufferedWriter) -> None:
        file.flush()
        if self._durable:
            os.fsync(file.fileno())

    def _check_root(self, verb: str) -> None:
        if not self._root.is_dir():
            raise self._explain(FileNotFoundError(errno.ENOENT, ""), verb)

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._explain(error, verb) from error

    def _explain(self, error: OSError, verb: str) -> StoreUnavailable:
        cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
        return StoreUnavailable(f"Cannot {verb} in the folder {self._root}: {cause}.")


def _open_to_append(path: str, flags: int) -> int:
    """Neither through a link to elsewhere nor into a pipe, which would hold the writer until somebody reads it."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _is_abandoned(path: Path, now: float) -> bool:
    try:
        return now - path.stat().st_mtime > ABANDONED_SECONDS
    except FileNotFoundError:
        return False  # finished this moment


def _whole_lines(path: Path, size: int) -> int:
    """The length of a log without a last line that a killed writer left unfinished."""
    with open(path, "rb") as file:
        position = size
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return 0
