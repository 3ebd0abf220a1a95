"""Places: what every file system does alike, and what only some do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError, StorageError
from llmbatch.storage.location import Location
from tests.support.s3 import S3Server, s3_fixture  # noqa: F401


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.bucket("storage")


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    """An empty folder on each kind of file system."""
    if request.param == "local":
        place = Location.at(str(tmp_path / "out"))
    elif request.param == "memory":
        place = Location.at("memory://storage/out")
    else:
        server = request.getfixturevalue("s3")
        place = Location.at(f"{request.getfixturevalue('bucket')}/out", server.storage_options)
    place.make()
    yield place
    place.clear()


@pytest.fixture
def local(tmp_path: Path) -> Location:
    return Location.at(str(tmp_path))


@pytest.fixture
def remote(s3: S3Server, bucket: str) -> Iterator[Location]:
    place = Location.at(f"{bucket}/remote", s3.storage_options)
    yield place
    place.clear()


def test_a_file_is_read_as_it_was_written(place: Location) -> None:
    place.write("a", b"one")
    assert place.read("a") == b"one"
    assert place.size("a") == 3


def test_an_empty_file_is_a_file(place: Location) -> None:
    place.write("a", b"")
    assert place.read("a") == b""
    assert place.size("a") == 0


def test_an_absent_file_is_none(place: Location) -> None:
    assert place.read("a") is None
    assert place.size("a") is None


def test_writing_again_replaces(place: Location) -> None:
    place.write("a", b"one")
    place.write("a", b"three")
    assert place.read("a") == b"three"


def test_names_are_those_directly_in_the_folder(place: Location) -> None:
    place.child("folder").make()
    for folder, name in ((place, "b"), (place, "a"), (place.child("folder"), "c")):
        folder.write(name, b"")
    assert place.names() == ["a", "b", "folder"]
    assert place.child("folder").names() == ["c"]


def test_where_nothing_is_there_are_no_names(place: Location) -> None:
    assert place.child("nothing").names() == []


def test_the_first_to_create_an_object_has_it(remote: Location) -> None:
    assert remote.create("a", b"first")
    assert not remote.create("a", b"second")
    assert remote.read("a") == b"first"


def test_a_file_being_written_appears_when_it_is_whole(place: Location) -> None:
    with place.writing("a") as file:
        file.write(b"one ")
        file.write(b"two")
        file.flush()
        assert place.names() == []
    assert place.names() == ["a"]
    assert place.read("a") == b"one two"


def test_a_file_whose_writing_failed_does_not_appear(place: Location) -> None:
    place.write("a", b"before")

    def write_half() -> None:
        with place.writing("a") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert place.names() == ["a"]
    assert place.read("a") == b"before"


def test_a_file_is_read_at_any_position(place: Location) -> None:
    data = os.urandom(3_000_000)
    place.write("a", data)
    with place.open("a") as file:
        assert file.read(10) == data[:10]
        assert file.seek(-5, os.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        file.seek(1000)
        assert file.read(2_500_000) == data[1000:2_501_000]
        assert file.tell() == 2_501_000


def test_arrow_writes_and_reads_parquet_in_a_place(place: Location) -> None:
    table = pa.table({"id": range(1000), "text": [str(i) for i in range(1000)]})
    with place.writing("a.parquet") as file:
        pq.write_table(table, file, row_group_size=100)
    with place.open("a.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(7) == table.slice(700, 100)


def test_opening_an_absent_file_is_an_error(place: Location) -> None:
    with pytest.raises(StorageError) as caught:
        place.open("a")
    assert str(caught.value) == f"{place.url}/a cannot be read: No such file or directory"


def test_a_moved_file_has_its_new_name_only(place: Location) -> None:
    place.child("staged").make()
    place.child("staged").write("a", b"new")
    place.write("b", b"old")
    place.child("staged").move("a", place, "b")
    assert place.read("b") == b"new"
    assert place.child("staged").names() == []


def test_moving_a_file_that_has_been_moved_is_nothing(place: Location) -> None:
    place.write("a", b"one")
    place.move("a", place, "b")
    place.move("a", place, "b")
    assert place.names() == ["b"]


def test_moving_a_file_that_never_was_is_an_error(place: Location) -> None:
    with pytest.raises(StorageError) as caught:
        place.move("a", place, "b")
    assert str(caught.value) == f"{place.url}/a cannot be moved to {place.url}/b: No such file or directory"


def test_a_removed_file_is_gone_and_removing_it_again_is_nothing(place: Location) -> None:
    place.write("a", b"")
    place.remove("a")
    place.remove("a")
    assert place.names() == []


def test_clearing_removes_all_below_and_nothing_beside(place: Location) -> None:
    work = place.child("work[1]")
    for folder in (work, work.child("deep"), place.child("work1")):
        folder.make()
        folder.write("a", b"")
    work.clear()
    work.clear()
    assert place.names() == ["work1"]


def test_what_another_client_writes_is_seen_at_once(remote: Location, s3: S3Server) -> None:
    other = Location.at(remote.url, {**s3.storage_options, "default_block_size": 6 << 20})
    assert other.filesystem is not remote.filesystem
    assert remote.names() == []
    other.write("a", b"one")
    assert remote.names() == ["a"]
    assert remote.size("a") == 3
    other.remove("a")
    assert remote.names() == []


def test_the_same_bytes_on_an_object_store_pass_for_ones_own(remote: Location) -> None:
    assert remote.create("a", b"token 1")
    assert remote.create("a", b"token 1")


def test_a_file_left_half_written_is_not_among_the_names(local: Location) -> None:
    Path(local.path(".llmbatch-0123456789abcdef")).touch()
    assert local.names() == []
    local.sweep()
    assert os.listdir(local.root) == []


def test_a_folder_is_left_when_nothing_is_in_it(local: Location) -> None:
    work = local.child("work")
    work.make()
    work.write("a", b"")
    work.leave()
    assert work.names() == ["a"]
    work.remove("a")
    work.leave()
    work.leave()
    assert local.names() == []


def test_the_folders_above_are_made(local: Location) -> None:
    local.child("a/b/c").make()
    local.child("a/b/c").make()
    assert local.child("a/b").names() == ["c"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(local: Location) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(StorageError) as caught, local.writing("a.parquet") as file:
            pq.write_table(pa.table({"bytes": [os.urandom(1000) for _ in range(2000)]}), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    message = f"{local.url}/a.parquet cannot be written: File too large: make room and run the same command again"
    assert str(caught.value) == message
    assert os.listdir(local.root) == []


@pytest.mark.parametrize(
    ("url", "shown", "root"),
    [
        ("/data/out", "/data/out", "/data/out"),
        ("/data/out/", "/data/out", "/data/out"),
        ("/", "/", "/"),
        ("file:///data/out//", "file:///data/out", "/data/out"),
        ("memory://", "memory://", ""),
        ("memory://data/out/", "memory://data/out", "/data/out"),
        ("s3://bucket/", "s3://bucket", "bucket"),
    ],
)
def test_a_place_is_shown_as_its_user_wrote_it(url: str, shown: str, root: str) -> None:
    place = Location.at(url)
    assert (place.url, place.root) == (shown, root)


@pytest.mark.parametrize(("url", "path"), [("/", "/a"), ("memory://", "/a"), ("s3://bucket/out", "bucket/out/a")])
def test_a_child_is_below_its_parent(url: str, path: str) -> None:
    assert Location.at(url).child("a").root == path


def test_a_protocol_that_nobody_knows_is_bad_input() -> None:
    with pytest.raises(DataError) as caught:
        Location.at("ftq://host/out")
    assert str(caught.value) == "ftq://host/out cannot be opened: Protocol not known: ftq"


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(DataError) as caught:
        Location.at("sftp://host/out")
    assert str(caught.value) == 'sftp://host/out cannot be opened: SFTPFileSystem requires "paramiko" to be installed'


def test_the_environment_says_where_the_object_store_is(remote: Location, s3: S3Server) -> None:
    code = f"from llmbatch.storage.location import Location; Location.at({remote.url!r}).write('a', b'from afar')"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **s3.environment}, check=True)
    assert remote.read("a") == b"from afar"
