"""What every store promises, tried on each of them; then what only a folder can suffer: links, pipes, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import NoReturn

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from rl_swarm.errors import KeyExists, KeyMissing, MalformedRecord, SettingsError, StoreUnavailable
from rl_swarm.protocols import Store
from rl_swarm.stores import open_store
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.keys import TEMPORARY
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.stores.patient import PatientStore

LEADING_AWAY = ["", "/", "/etc/passwd", "../x", "a/../x", "a/./x", "a//b", "a/", f"{TEMPORARY}x", f"a/{TEMPORARY}x/b"]
BAD_KEYS = [*LEADING_AWAY, "a\x00b", "a\nb", "a\x1b[2Jb", "a\\b", "\udcff"]


def no_waiting(error: StoreUnavailable, attempt: int) -> NoReturn:
    raise AssertionError(f"a store in good health was waited for: {error}")


# A new store joins the contract by a line here.
STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda root: MemoryStore(),
    "folder": lambda root: FolderStore(root, durable=True),
    "folder, not durable": lambda root: FolderStore(root, durable=False),
    "folder without links": lambda root: FolderStore(root, durable=False),
    "patient": lambda root: PatientStore(MemoryStore(), no_waiting),
    "patient folder": lambda root: PatientStore(FolderStore(root, durable=False), no_waiting),
}


def refuse_links(source: object, target: object) -> NoReturn:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder without links":
        monkeypatch.setattr(os, "link", refuse_links)
    return STORES[request.param](tmp_path)


@pytest.fixture
def _many_switches() -> Iterator[None]:
    """Threads take turns as often as the interpreter can: races that exist do happen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*bodies: Callable[[], None]) -> None:
    """Run all at once, each in a thread of its own; what one raises is raised here."""
    start = threading.Barrier(len(bodies))
    failures: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        start.wait()
        try:
            body()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# The contract


def test_what_is_put_is_got(store: Store) -> None:
    store.put("a/b/c", b"first")
    assert store.get("a/b/c") == b"first"
    store.put("a/b/c", b"")
    assert store.get("a/b/c") == b""
    store.put("a/b/c", bytes(range(256)) * 1000)
    assert store.get("a/b/c") == bytes(range(256)) * 1000


def test_a_missing_key_is_named(store: Store) -> None:
    store.put("a/b", b"")
    for key in ("c", "a/c", "a/b/c"):
        with pytest.raises(KeyMissing, match=key):
            store.get(key)
    with pytest.raises(KeyMissing, match="a/c"):
        store.move("a/c", "a/d")


def test_a_value_above_the_limit_is_refused_and_one_at_the_limit_is_not(store: Store) -> None:
    store.put("key", b"12345")
    assert store.get("key", 5) == store.get("key", 6) == store.get("key", None) == b"12345"
    with pytest.raises(MalformedRecord) as caught:
        store.get("key", 4)
    assert caught.value.reason == "too_large"
    store.put("key", b"")
    assert store.get("key", 0) == b""


def test_create_refuses_a_key_that_exists_and_leaves_it_alone(store: Store) -> None:
    store.create("a/b", b"first")
    with pytest.raises(KeyExists, match="a/b"):
        store.create("a/b", b"second")
    assert store.get("a/b") == b"first"
    store.put("a/c", b"put")
    with pytest.raises(KeyExists):
        store.create("a/c", b"created")
    store.delete("a/b")
    store.create("a/b", b"again")
    assert store.get("a/b") == b"again"


@pytest.mark.usefixtures("_many_switches")
def test_of_several_creators_exactly_one_wins(store: Store) -> None:
    for attempt in range(25):
        winners: list[bytes] = []

        def creator(value: bytes, key: str, winners: list[bytes] = winners) -> Callable[[], None]:
            def body() -> None:
                try:
                    store.create(key, value)
                except KeyExists:
                    return
                winners.append(value)

            return body

        together(*(creator(str(number).encode(), f"race/{attempt}") for number in range(4)))
        assert len(winners) == 1
        assert store.get(f"race/{attempt}") == winners[0]


@pytest.mark.usefixtures("_many_switches")
def test_a_reader_never_sees_a_part_of_a_value(store: Store) -> None:
    values = [bytes([number]) * 200_000 for number in range(3)]
    store.put("key", values[0])

    def write() -> None:
        for number in range(60):
            store.put("key", values[number % 3])

    def read() -> None:
        for _ in range(60):
            assert store.get("key") in values

    together(write, read, read)


@pytest.mark.usefixtures("_many_switches")
def test_a_reader_never_sees_a_part_of_a_value_that_is_created(store: Store) -> None:
    value = b"x" * 1_000_000
    done = threading.Event()

    def write() -> None:
        for number in range(20):
            store.create(f"file_{number}", value)
        done.set()

    def read() -> None:
        for number in range(20):
            found = b""
            while not found:
                finished = done.is_set()
                try:
                    found = store.get(f"file_{number}")
                except KeyMissing:
                    assert not finished
                else:
                    assert found == value

    together(write, read, read)


def test_a_log_grows_by_whole_lines(store: Store) -> None:
    store.append("logs/a", b"one")
    assert store.get("logs/a") == b"one\n"
    store.append("logs/a", b"")
    store.append("logs/a", b"three")
    assert store.get("logs/a") == b"one\n\nthree\n"


def test_keys_are_found_by_prefix_deep_and_shallow(store: Store) -> None:
    for key in ("a/1", "a/2", "a/b/1", "a/b/c/1", "ab/1", "abc", "b"):
        store.put(key, b"")
    assert list(store.keys("")) == ["a/1", "a/2", "a/b/1", "a/b/c/1", "ab/1", "abc", "b"]
    assert list(store.keys("a/")) == ["a/1", "a/2", "a/b/1", "a/b/c/1"]
    assert list(store.keys("a")) == ["a/1", "a/2", "a/b/1", "a/b/c/1", "ab/1", "abc"]
    assert list(store.keys("a/b")) == ["a/b/1", "a/b/c/1"]
    assert list(store.keys("abc")) == ["abc"]
    assert list(store.keys("nothing/")) == list(store.keys("b/")) == list(store.keys("x")) == []
    assert list(store.keys("", shallow=True)) == ["a/", "ab/", "abc", "b"]
    assert list(store.keys("a/", shallow=True)) == ["a/1", "a/2", "a/b/"]
    assert list(store.keys("a", shallow=True)) == ["a/", "ab/", "abc"]
    assert list(store.keys("nothing/", shallow=True)) == []


def test_a_deleted_key_is_gone_and_deleting_it_again_is_no_error(store: Store) -> None:
    store.put("a/b/c", b"")
    store.put("a/d", b"")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/there")
    assert list(store.keys("")) == ["a/d"]
    assert list(store.keys("a/", shallow=True)) == ["a/d"], "a folder without keys is not listed"


def test_a_moved_key_is_found_at_its_new_place_only(store: Store) -> None:
    store.put("a/b/c", b"value")
    store.put("x/y", b"replaced")
    store.move("a/b/c", "x/y")
    with pytest.raises(KeyMissing):
        store.move("a/b/c", "new/place")
    assert store.get("x/y") == b"value"
    assert list(store.keys("")) == ["x/y"]
    assert list(store.keys("", shallow=True)) == ["x/"], "a folder without keys is not listed"


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_a_key_that_could_lead_elsewhere_is_refused_by_every_method(store: Store, key: str) -> None:
    store.put("good", b"")
    for use in (
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.append(key, b""),
        lambda: store.move(key, "other"),
        lambda: store.move("good", key),
    ):
        with pytest.raises(ValueError, match="not a valid key"):
            use()
    if key in LEADING_AWAY:
        with pytest.raises(ValueError, match="not a valid key"):
            store.delete(key)
    assert list(store.keys("")) == ["good"]


@pytest.mark.parametrize("prefix", ["../", "/", "/etc/", "a/../../", "a//"])
def test_a_listing_does_not_lead_out_of_the_store_either(store: Store, prefix: str) -> None:
    with pytest.raises(ValueError, match="not a valid key"):
        list(store.keys(prefix))


# Any history of calls: the stores agree with a dictionary

FOLDERS = st.lists(st.sampled_from(["p", "pq"]), max_size=2)
KEYS = st.builds(lambda folders, name: "/".join([*folders, name]), FOLDERS, st.sampled_from(["x.f", "xy.f", "z.f"]))
PREFIXES = st.one_of(st.builds(lambda key, length: key[:length], KEYS, st.integers(0, 8)), st.just("p/"))
VALUES = st.binary(max_size=5)


class StoresAgainstDictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp())
        self.stores: list[Store] = [MemoryStore(), FolderStore(self.root, durable=False)]
        self.values: dict[str, bytes] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for store in self.stores:
            store.put(key, value)

    @rule(key=KEYS, value=VALUES)
    def create(self, key: str, value: bytes) -> None:
        for store in self.stores:
            if key in self.values:
                with pytest.raises(KeyExists):
                    store.create(key, value)
            else:
                store.create(key, value)
        self.values.setdefault(key, value)

    @rule(key=KEYS, line=st.sampled_from([b"", b"line"]))
    def append(self, key: str, line: bytes) -> None:
        # Logs and values do not share keys: what a put left without a newline would be taken for a torn line.
        if not self.values.get(key, b"").endswith(b"\n"):
            self.values.pop(key, None)
            for store in self.stores:
                store.delete(key)
        self.values[key] = self.values.get(key, b"") + line + b"\n"
        for store in self.stores:
            store.append(key, line)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.values.pop(key, None)
        for store in self.stores:
            store.delete(key)

    @rule(key=KEYS, goal=KEYS)
    def move(self, key: str, goal: str) -> None:
        for store in self.stores:
            if key in self.values:
                store.move(key, goal)
            else:
                with pytest.raises(KeyMissing):
                    store.move(key, goal)
        if key in self.values:
            self.values[goal] = self.values.pop(key)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        for store in self.stores:
            if key in self.values:
                assert store.get(key) == self.values[key]
            else:
                with pytest.raises(KeyMissing):
                    store.get(key)

    @rule(prefix=PREFIXES)
    def keys(self, prefix: str) -> None:
        deep = sorted(key for key in self.values if key.startswith(prefix))
        start = prefix.rfind("/") + 1
        heads = {key[: key.index("/", start) + 1] if "/" in key[start:] else key for key in deep}
        for store in self.stores:
            assert list(store.keys(prefix)) == deep
            assert list(store.keys(prefix, shallow=True)) == sorted(heads)


TestStoresAgainstDictionary = StoresAgainstDictionary.TestCase
TestStoresAgainstDictionary.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)


# Folders: what a killed writer leaves


@pytest.mark.parametrize("torn", [b"one\ntwo\nthr", b"one\ntwo\n" + b"x" * 200_000, b"one\ntwo\n"])
def test_a_line_torn_by_a_killed_writer_is_cut_off_by_the_next_append(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "log").write_bytes(torn)
    store = FolderStore(tmp_path)
    store.append("log", b"three")
    store.append("log", b"four")
    assert store.get("log") == b"one\ntwo\nthree\nfour\n"


def test_a_log_that_is_one_torn_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 100_000)
    store = FolderStore(tmp_path)
    store.append("log", b"one")
    assert store.get("log") == b"one\n"


def test_what_a_killed_writer_left_is_not_listed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a/key", b"")
    (tmp_path / "a" / f"{TEMPORARY}0123").write_bytes(b"half of a val")
    (tmp_path / f"{TEMPORARY}4567").write_bytes(b"")
    assert store.keys("") == ["a/key"]
    assert store.keys("", shallow=True) == ["a/"]
    assert store.keys(".") == store.keys(TEMPORARY) == []


def test_neither_success_nor_refusal_leaves_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    for _ in range(2):
        store.put("put", b"")
        for _ in range(2):
            try:
                store.create(f"created {os.link.__name__}", b"")
            except KeyExists:
                pass
        monkeypatch.setattr(os, "link", refuse_links)
    assert sorted(os.listdir(tmp_path)) == ["created link", "created refuse_links", "put"]


def test_without_links_a_second_creator_loses_even_in_the_middle_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replace = FolderStore(tmp_path), os.replace
    monkeypatch.setattr(os, "link", refuse_links)

    def second_creator_first(source: Path, goal: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyExists):
            store.create("key", b"second")
        replace(source, goal)

    monkeypatch.setattr(os, "replace", second_creator_first)
    store.create("key", b"first")
    assert store.get("key") == b"first"


# Folders: what somebody planted


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.write_bytes(b"secret\n")
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [None, 100])
def test_a_pipe_a_link_or_a_folder_in_place_of_a_file_is_not_read(
    tmp_path: Path, elsewhere: Path, limit: int | None
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "broken link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    store = FolderStore(tmp_path)
    opened = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for key in ("pipe", "link", "broken link", "folder"):
        with pytest.raises(MalformedRecord) as caught:
            store.get(key, limit)
        assert caught.value.reason == "not_a_file", key
    if opened:
        assert len(os.listdir("/proc/self/fd")) == opened, "a refused file is closed again"


@pytest.mark.timeout(20)
def test_no_log_is_written_into_a_pipe_or_through_a_link(tmp_path: Path, elsewhere: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(elsewhere)
    store = FolderStore(tmp_path)
    for key in ("pipe", "link"):
        with pytest.raises(StoreUnavailable, match=f"a {key} stands where a file should be"):
            store.append(key, b"line")
    assert elsewhere.read_bytes() == b"secret\n"


def test_what_was_planted_under_an_impossible_name_can_be_removed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in (b"\x1b[2J", b"a\nb", b"\xff", b"a\\b"):
        with open(os.path.join(os.fsencode(tmp_path / "folder"), name), "wb"):
            pass
    for key in store.keys("folder/"):
        store.delete(key)
    assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_replaced_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "link").symlink_to(elsewhere)
    store = FolderStore(tmp_path)
    with pytest.raises(KeyExists):
        store.create("link", b"created")
    store.put("link", b"put")
    assert store.get("link") == b"put"
    assert elsewhere.read_bytes() == b"secret\n"


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**30)
    store = FolderStore(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRecord) as caught:
            store.get("huge", 8 * 2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "too_large"


def test_a_generous_limit_costs_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.append("log", b"a short line")
    tracemalloc.start()
    try:
        assert store.get("log", 2**30) == b"a short line\n"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_its_owner_keeps_to_himself_is_malformed_not_a_reason_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    store.put("private", b"")

    def deny(path: object, flags: int) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root, as which tests often run, may read everything: so the refusal is the test's.
    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(MalformedRecord) as caught:
        store.get("private")
    assert caught.value.reason == "no_permission"


# Folders: disks in trouble


def test_a_missing_root_is_refused_with_a_question_that_helps(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "missing" / "deeper"):
        with pytest.raises(StoreUnavailable, match="is the drive mounted"):
            FolderStore(path)
    with pytest.raises(StoreUnavailable, match="is the drive mounted"):
        open_store(str(tmp_path / "missing" / "deeper"), create=True)
    assert list(tmp_path.iterdir()) == []
    open_store(str(tmp_path / "missing"), create=True).put("a", b"")
    assert (tmp_path / "missing" / "a").exists()


def test_a_file_in_place_of_the_root_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="a file stands where a folder should be"):
        open_store(str(tmp_path / "file"), create=True)


def test_a_root_that_vanishes_is_unavailable_and_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    store = FolderStore(root, create=True)
    store.put("a/key", b"value")
    root.rename(tmp_path / "unmounted")
    for use in (
        lambda: store.get("a/key"),
        lambda: store.put("a/key", b""),
        lambda: store.create("a/new", b""),
        lambda: store.append("a/log", b""),
        lambda: store.keys("a/"),
        lambda: store.delete("a/key"),
        lambda: store.move("a/key", "a/other"),
    ):
        with pytest.raises(StoreUnavailable, match="is the drive mounted"):
            use()
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    assert store.get("a/key") == b"value"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB of its own."""
    root = tmp_path / "disk"
    root.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)], capture_output=True)
    if mounting.returncode:
        pytest.skip(f"no right to mount a disk here: {mounting.stderr.decode().strip()}")
    yield root
    subprocess.run(["umount", str(root)], check=True)


WRITES: dict[str, Callable[[Store, bytes], None]] = {
    "put": lambda store, value: store.put("a/old", value),
    "put new": lambda store, value: store.put("a/new", value),
    "create": lambda store, value: store.create("a/new", value),
    "append": lambda store, value: store.append("a/log", value),
}
BEFORE = {"a/log": b"first line\n", "a/old": b"old value"}


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.keys("")}


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_refuses_whole_writes_and_takes_them_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, write: str, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    root = small_disk / "root"
    store = FolderStore(root, create=True)
    for key, value in BEFORE.items():
        store.put(key, value)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 160_000)
    value = b"y" * 100_000
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"Cannot write in the folder {root}: the disk is full"):
            WRITES[write](store, value)
        assert contents(store) == BEFORE
        assert sorted(os.listdir(root / "a")) == ["log", "old"]
    filler.unlink()
    WRITES[write](store, value)
    written = {"put": {"a/old": value}, "append": {"a/log": BEFORE["a/log"] + value + b"\n"}}
    assert contents(store) == BEFORE | written.get(write, {"a/new": value})


@pytest.mark.parametrize("write", WRITES)
def test_a_read_only_disk_is_read_and_refuses_writes_until_it_is_mended(small_disk: Path, write: str) -> None:
    store = FolderStore(small_disk)
    for key, value in BEFORE.items():
        store.put(key, value)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreUnavailable, match="it is mounted read-only"):
        WRITES[write](store, b"value")
    with pytest.raises(StoreUnavailable, match="it is mounted read-only"):
        store.delete("a/old")
    with pytest.raises(StoreUnavailable, match="it is mounted read-only"):
        store.move("a/old", "a/new")
    assert contents(store) == BEFORE
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    WRITES[write](store, b"value")
    written = {"put": {"a/old": b"value"}, "append": {"a/log": BEFORE["a/log"] + b"value\n"}}
    assert contents(store) == BEFORE | written.get(write, {"a/new": b"value"})
    assert not [name for name in os.listdir(small_disk / "a") if name.startswith(TEMPORARY)]


def test_a_durable_folder_forces_every_write_to_disk_and_the_other_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    for durable in (True, False):
        store = FolderStore(tmp_path, durable=durable)
        store.put("put", b"")
        store.create(f"created {durable}", b"")
        store.append("log", b"")
        assert len(forced) == 3


# Patience


def test_a_patient_store_waits_until_the_trouble_is_over(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    plain = FolderStore(root, create=True)
    plain.put("key", b"value")
    away = tmp_path / "unmounted"
    waits: list[tuple[str, int]] = []

    def wait(error: StoreUnavailable, attempt: int) -> None:
        waits.append((str(error), attempt))
        if attempt == 3:
            away.rename(root)

    store = PatientStore(plain, wait)
    uses: list[Callable[[], object]] = [
        lambda: store.get("key"),
        lambda: store.put("put", b""),
        lambda: store.create("created", b""),
        lambda: store.append("log", b""),
        lambda: store.keys(""),
        lambda: store.delete("put"),
        lambda: store.move("created", "moved"),
    ]
    for use in uses:
        root.rename(away)
        waits.clear()
        use()
        assert [attempt for _, attempt in waits] == [1, 2, 3]
        assert "is the drive mounted" in waits[0][0]
    assert plain.keys("") == ["key", "log", "moved"]


def test_a_patient_store_waits_for_nothing_that_waiting_does_not_mend() -> None:
    store = PatientStore(MemoryStore(), no_waiting)
    store.put("key", b"value")
    with pytest.raises(KeyMissing):
        store.get("other")
    with pytest.raises(KeyExists):
        store.create("key", b"")
    with pytest.raises(MalformedRecord):
        store.get("key", 1)


def test_patience_ends_when_the_wait_says_so(tmp_path: Path) -> None:
    store = PatientStore(FolderStore(tmp_path / "root", create=True), lambda error, attempt: stop(error))
    (tmp_path / "root").rmdir()
    with pytest.raises(StoreUnavailable):
        store.put("key", b"")


def stop(error: StoreUnavailable) -> NoReturn:
    raise error


# Addresses


@pytest.mark.parametrize("address", ["s3://bucket/prefix", "gs://bucket", "zenoh://somewhere"])
def test_an_address_without_a_store_is_a_bad_setting(address: str) -> None:
    with pytest.raises(SettingsError, match=r"GDRIVE_PATH='.*' is not allowed.*give a folder"):
        open_store(address)


def test_what_a_killed_writer_left_goes_with_its_folder_but_not_while_it_may_be_in_use(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for name, age in (("fresh", 0.0), ("old", 7200.0)):
        store.put(f"{name}/key", b"value")
        leftover = tmp_path / name / ".tmp-0123456789abcdef"
        leftover.write_bytes(b"half a val")
        then = time.time() - age
        os.utime(leftover, (then, then))
        store.delete(f"{name}/key")
    assert (tmp_path / "fresh" / ".tmp-0123456789abcdef").exists()
    assert not (tmp_path / "old").exists()


def test_without_links_a_claim_whose_maker_was_killed_is_taken_over_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    store = FolderStore(tmp_path)
    claim = tmp_path / ".tmp-key"
    claim.touch()
    with pytest.raises(KeyExists):
        store.create("key", b"value")
    then = time.time() - 7200
    os.utime(claim, (then, then))
    store.create("key", b"value")
    assert store.get("key") == b"value"
    assert not claim.exists()


def test_a_writer_and_somebody_who_tidies_up_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, durable=False)
    failures: list[Exception] = []

    def write_and_delete(name: str) -> None:
        try:
            for _ in range(300):
                store.put(f"folder/{name}", b"value")
                store.delete(f"folder/{name}")
        except StoreUnavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=write_and_delete, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
