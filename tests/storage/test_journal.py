"""Journals: what was appended is read again, whatever happened to the last record."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import StorageError
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location
from tests.support.s3 import S3Server, s3_fixture  # noqa: F401

NAME = "journal-00000"


def batch(*texts: str | None) -> pa.RecordBatch:
    keys = np.arange(len(texts), dtype=np.uint64)
    return pa.record_batch({"key": keys, "text": pa.array(texts, pa.string())})


ONE, TWO, THREE = batch("one", None), batch("two"), batch("three", "drei", "trois")


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.bucket("journal")


@pytest.fixture
def local(tmp_path: Path) -> Location:
    return Location.at(str(tmp_path))


@pytest.fixture
def remote(s3: S3Server, bucket: str) -> Iterator[Location]:
    place = Location.at(f"{bucket}/out", s3.storage_options)
    yield place
    place.clear()


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Location:
    """An empty folder, on a local disk and on S3."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def append(place: Location, *batches: pa.RecordBatch) -> None:
    journal = Journal.open(place, NAME)
    for each in batches:
        journal.append(each)
    journal.close()


def records(place: Location) -> list[pa.RecordBatch]:
    return list(Journal.open(place, NAME).records())


def test_a_journal_that_is_not_there_is_empty_and_is_not_made(place: Location) -> None:
    assert records(place) == []
    assert place.names() == []


def test_records_are_read_in_the_order_in_which_they_were_appended(place: Location) -> None:
    append(place, ONE, TWO, THREE)
    assert records(place) == [ONE, TWO, THREE]


def test_a_journal_is_gone_on_with(place: Location) -> None:
    append(place, ONE)
    append(place, TWO)
    append(place, THREE)
    assert records(place) == [ONE, TWO, THREE]


def test_a_record_is_there_when_append_returns(place: Location) -> None:
    journal = Journal.open(place, NAME)
    journal.append(ONE)
    assert records(place) == [ONE]
    assert list(journal.records()) == [ONE]
    journal.append(TWO)
    assert records(place) == list(journal.records()) == [ONE, TWO]
    journal.close()


def test_records_may_have_different_columns(place: Location) -> None:
    other = pa.record_batch({"n": pa.array([1.5]), "kind": pa.array(["a"]).dictionary_encode()})
    append(place, ONE, other, ONE.slice(0, 0), ONE.slice(1, 1))
    assert records(place) == [ONE, other, ONE.slice(0, 0), ONE.slice(1, 1)]


def test_two_journals_in_a_folder_are_apart(place: Location) -> None:
    append(place, ONE)
    Journal.open(place, "journal-00001").append(TWO)
    assert records(place) == [ONE]
    assert list(Journal.open(place, "journal-00001").records()) == [TWO]


def test_a_removed_journal_is_gone(place: Location) -> None:
    journal = Journal.open(place, NAME)
    journal.append(ONE)
    journal.append(TWO)
    journal.remove()
    assert place.names() == []


@given(st.lists(st.lists(st.one_of(st.none(), st.text(), st.just("\xffJ1\n")), max_size=5), max_size=5), st.data())
def test_a_journal_cut_anywhere_has_the_records_before_the_cut(
    texts: list[list[str | None]], data: st.DataObject
) -> None:
    batches = [batch(*each) for each in texts]
    with tempfile.TemporaryDirectory() as folder:
        place = Location.at(folder)
        ends = [0]
        for each in batches:
            append(place, each)
            ends.append(place.size(NAME) or 0)
        Path(folder, NAME).touch()
        cut = data.draw(st.integers(0, ends[-1]))
        os.truncate(place.path(NAME), cut)
        whole = sum(end <= cut for end in ends[1:])
        assert records(place) == batches[:whole]
        append(place, THREE)
        assert records(place) == [*batches[:whole], THREE]


def test_a_last_record_cut_at_any_byte_is_forgotten_and_the_next_one_takes_its_place(local: Location) -> None:
    append(local, ONE, TWO)
    before = local.size(NAME) or 0
    append(local, THREE)
    path = Path(local.path(NAME))
    whole = path.read_bytes()
    for cut in range(before, len(whole)):
        path.write_bytes(whole[:cut])
        assert records(local) == [ONE, TWO]
        append(local, THREE)
        assert path.read_bytes() == whole


def test_a_last_record_whose_bytes_never_reached_the_disk_is_forgotten(local: Location) -> None:
    append(local, ONE)
    before = local.size(NAME) or 0
    append(local, TWO)
    after = local.size(NAME) or 0
    os.truncate(local.path(NAME), before + 30)
    os.truncate(local.path(NAME), after)
    assert records(local) == [ONE]


@pytest.mark.parametrize(
    "place_in_record", [0, 5, 9, 40, -1], ids=["mark", "checksum", "length", "payload", "last byte"]
)
def test_a_record_damaged_before_a_whole_one_is_an_error(local: Location, place_in_record: int) -> None:
    append(local, ONE)
    start = local.size(NAME) or 0
    append(local, TWO)
    end = local.size(NAME) or 0
    append(local, THREE)
    data = bytearray(Path(local.path(NAME)).read_bytes())
    data[(start if place_in_record >= 0 else end) + place_in_record] ^= 1
    Path(local.path(NAME)).write_bytes(data)
    with pytest.raises(StorageError) as caught:
        Journal.open(local, NAME)
    assert str(caught.value) == (
        f"{local.url}/{NAME} is damaged at byte {start:,}, which no crash of a job does: "
        "remove it, and the rows it answers are run again"
    )


def test_a_journal_cut_while_it_is_open_is_an_error_to_read(local: Location) -> None:
    append(local, ONE, TWO)
    journal = Journal.open(local, NAME)
    os.truncate(local.path(NAME), 100)
    with pytest.raises(StorageError, match="is damaged at byte 0"):
        list(journal.records())


def test_a_full_disk_is_an_error_and_what_was_before_stays(local: Location) -> None:
    large = batch("x" * 100_000)
    journal = Journal.open(local, NAME)
    journal.append(ONE)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(StorageError) as caught:
            journal.append(large)
        assert local.size(NAME) == 50_000
        assert records(local) == list(journal.records()) == [ONE]
        journal.append(TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    journal.append(large)
    journal.close()
    message = f"{local.url}/{NAME} cannot be written: File too large: make room and run the same command again"
    assert str(caught.value) == message
    assert records(local) == [ONE, TWO, large]


def test_a_folder_that_is_not_there_is_an_error(local: Location) -> None:
    place = local.child("gone")
    with pytest.raises(StorageError) as caught:
        append(place, ONE)
    assert str(caught.value) == f"{place.url}/{NAME} cannot be written: No such file or directory"


def test_a_second_writer_is_found_out(place: Location) -> None:
    journal, other = Journal.open(place, NAME), Journal.open(place, NAME)
    other.append(ONE)
    other.close()
    with pytest.raises(StorageError) as caught:
        journal.append(TWO)
    journal.close()
    written = NAME if place.local else f"{NAME}-000000"
    assert str(caught.value) == (
        f"{place.url}/{written} has been written or removed by another process: let one job at a time write an output"
    )
    assert records(place) == [ONE]


def test_a_journal_removed_under_its_writer_is_found_out(local: Location) -> None:
    journal = Journal.open(local, NAME)
    journal.append(ONE)
    local.remove(NAME)
    with pytest.raises(StorageError, match="has been written or removed by another process"):
        journal.append(TWO)
    journal.close()


def test_each_record_on_an_object_store_is_a_numbered_object(remote: Location) -> None:
    append(remote, ONE, TWO)
    append(remote, THREE)
    assert remote.names() == [f"{NAME}-000000", f"{NAME}-000001", f"{NAME}-000002"]


def test_a_missing_segment_is_an_error(remote: Location) -> None:
    append(remote, ONE, TWO)
    remote.remove(f"{NAME}-000000")
    with pytest.raises(StorageError) as caught:
        Journal.open(remote, NAME)
    assert str(caught.value) == (
        f"{remote.url}/{NAME}-000000 is missing, and later segments of its journal are there: "
        "put it back, or start over with --restart"
    )


@pytest.mark.parametrize("data", [b"", b"\xffJ1\n", b"nonsense that is longer than a header is"])
def test_a_damaged_segment_is_an_error(remote: Location, data: bytes) -> None:
    append(remote, ONE, TWO)
    remote.write(f"{NAME}-000001", data)
    found = Journal.open(remote, NAME).records()
    assert next(found) == ONE
    with pytest.raises(StorageError) as caught:
        next(found)
    assert str(caught.value) == (
        f"{remote.url}/{NAME}-000001 is damaged, which no crash of a job does: start over with --restart"
    )
