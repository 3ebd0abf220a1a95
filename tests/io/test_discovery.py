"""Which files a path, a folder, a glob or a URL names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.reading.discovery import find_files
from llmbatch.storage import retries
from tests.support.datasets import jsonl, parquet, refusal
from tests.support.s3 import S3Server, Trouble, s3_fixture  # noqa: F401


def files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def found(*paths: object, within: object) -> Sequence[str]:
    prefix = f"{within}/"
    listed = [file.path for file in find_files([str(path) for path in paths], None)]
    assert all(path.startswith(prefix) for path in listed)
    return [path.removeprefix(prefix) for path in listed]


def test_files_come_in_the_order_given_and_those_of_folders_and_globs_sorted(tmp_path: Path) -> None:
    files(tmp_path, "z.parquet", "data/b.parquet", "data/a.parquet", "data/deep/c.parquet")
    files(tmp_path, "more/2.parquet", "more/10.parquet")
    assert found(tmp_path / "z.parquet", tmp_path / "data", tmp_path / "more" / "*.parquet", within=tmp_path) == [
        "z.parquet",
        "data/a.parquet",
        "data/b.parquet",
        "data/deep/c.parquet",
        "more/10.parquet",
        "more/2.parquet",
    ]


def test_a_folder_stands_for_its_parquet_and_jsonl_files(tmp_path: Path) -> None:
    names = ["A.PARQUET", "a.parquet", "b.jsonl", "c.jsonl.gz", "d.jsonl.zst", "e.json", "f.ndjson", "g.pq"]
    files(tmp_path, *names, "h.csv", "i.gz", "j.parquet.gz")
    assert found(tmp_path, within=tmp_path) == names


# Links


def test_linked_folders_and_files_are_followed(tmp_path: Path) -> None:
    files(tmp_path, "far/b.parquet", "far/deep/c.parquet", "other/d.parquet", "in/a.parquet")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "in" / "one.parquet").symlink_to(tmp_path / "other" / "d.parquet")
    names = ["in/a.parquet", "in/linked/b.parquet", "in/linked/deep/c.parquet", "in/one.parquet"]
    assert found(tmp_path / "in", within=tmp_path) == names
    assert found(tmp_path / "in" / "**" / "*.parquet", within=tmp_path) == names
    assert found(tmp_path / "in" / "*" / "*.parquet", within=tmp_path) == ["in/linked/b.parquet"]
    assert found(tmp_path / "in" / "l*", within=tmp_path) == names[1:3]


def test_links_that_lead_back_end(tmp_path: Path) -> None:
    files(tmp_path, "in/x/a.parquet")
    (tmp_path / "in" / "x" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to(tmp_path / "in" / "self")
    assert found(tmp_path / "in", within=tmp_path) == ["in/x/a.parquet"]
    assert found(tmp_path / "in" / "**" / "*.parquet", within=tmp_path) == ["in/x/a.parquet"]


def test_a_file_that_links_lead_to_as_well_is_there_once(tmp_path: Path) -> None:
    files(tmp_path, "in/v3/a.parquet")
    (tmp_path / "in" / "latest").symlink_to(tmp_path / "in" / "v3")
    assert found(tmp_path / "in", within=tmp_path) == ["in/v3/a.parquet"]


def test_a_link_to_what_does_not_count_by_its_name_counts(tmp_path: Path) -> None:
    """As the hub keeps its files: links with names to files without."""
    files(tmp_path, "in/blobs/0123", "in/.hidden/b.parquet")
    (tmp_path / "in" / "snapshots").mkdir()
    (tmp_path / "in" / "snapshots" / "a.parquet").symlink_to(tmp_path / "in" / "blobs" / "0123")
    (tmp_path / "in" / "shown").symlink_to(tmp_path / "in" / ".hidden")
    names = ["in/shown/b.parquet", "in/snapshots/a.parquet"]
    assert found(tmp_path / "in", within=tmp_path) == names
    assert found(tmp_path / "in" / "**" / "*.parquet", within=tmp_path) == names


def test_a_link_to_nothing_is_refused_by_name(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", a=[1])
    (tmp_path / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    assert refusal(str(tmp_path)).startswith(f"{tmp_path / 'b.parquet'} cannot be read as Parquet (")


def test_an_edited_target_of_a_linked_file_is_noticed(tmp_path: Path) -> None:
    target = Path(parquet(tmp_path / "far" / "a.parquet", a=[1]))
    (tmp_path / "link.parquet").symlink_to(target)
    before = Dataset.resolve([str(tmp_path / "link.parquet")]).identity
    os.utime(target, (1, 1))
    after = Dataset.resolve([str(tmp_path / "link.parquet")]).identity
    assert before[0]["size"] == after[0]["size"]
    assert before != after


# Names


def test_names_that_begin_with_an_underscore_or_a_dot_are_left_out(tmp_path: Path) -> None:
    files(tmp_path, "a.parquet", "_b.parquet", ".c.parquet", "_work/d.parquet", "notes.txt")
    for path in (tmp_path, tmp_path / "*.parquet", tmp_path / "**" / "*.parquet"):
        assert found(path, within=tmp_path) == ["a.parquet"]


def test_what_a_job_keeps_beside_its_output_file_is_left_out(tmp_path: Path) -> None:
    files(tmp_path, "a.jsonl", "a.jsonl._llmbatch.json", "a.jsonl._llmbatch.arrow", "b.jsonl._llmbatch/c.parquet")
    for path in (tmp_path, tmp_path / "*", tmp_path / "**" / "*.json*"):
        assert found(path, within=tmp_path) == ["a.jsonl"]


def test_a_hidden_folder_above_the_one_named_does_not_matter(tmp_path: Path) -> None:
    files(tmp_path, ".cache/a.parquet")
    assert found(tmp_path / ".cache", within=tmp_path) == [".cache/a.parquet"]
    assert found(tmp_path / ".cache" / "*.parquet", within=tmp_path) == [".cache/a.parquet"]


def test_two_stars_stand_for_any_folders(tmp_path: Path) -> None:
    files(tmp_path, "a.parquet", "b/c.parquet", "b/c/d.parquet", "e/notes.txt")
    assert found(tmp_path / "**" / "*.parquet", within=tmp_path) == ["a.parquet", "b/c.parquet", "b/c/d.parquet"]


def test_a_glob_that_matches_folders_takes_their_files(tmp_path: Path) -> None:
    files(tmp_path, "x1/a.parquet", "x2/deep/a.parquet", "x2/notes.txt", "x3/notes.txt", "y/a.parquet")
    assert found(tmp_path / "x*", within=tmp_path) == ["x1/a.parquet", "x2/deep/a.parquet"]
    assert found(tmp_path / "x2" / "**", within=tmp_path) == ["x2/deep/a.parquet"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    files(tmp_path, "a[1].parquet")
    assert found(tmp_path / "a[1].parquet", within=tmp_path) == ["a[1].parquet"]


def test_a_file_named_twice_is_listed_once(tmp_path: Path) -> None:
    files(tmp_path, "a.parquet", "b.parquet")
    path = tmp_path / "b.parquet"
    assert found(path, tmp_path, path, within=tmp_path) == ["b.parquet", "a.parquet"]


def test_file_urls_are_paths(tmp_path: Path) -> None:
    files(tmp_path, "a.parquet")
    assert found(f"file://{tmp_path}", within=tmp_path) == ["a.parquet"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.PARQUET", ("Parquet", None)),
        ("a.pq", ("Parquet", None)),
        ("a.json", ("JSONL", None)),
        ("a.ndjson.gz", ("JSONL", "gzip")),
        ("a.jsonl.zst", ("JSONL", "zstd")),
    ],
)
def test_a_name_says_what_a_file_holds(tmp_path: Path, name: str, kind: tuple[str, str | None]) -> None:
    files(tmp_path, name)
    [file] = find_files([str(tmp_path / name)], None)
    assert (file.format, file.codec) == kind


def test_no_input_is_refused() -> None:
    assert refusal() == "at least one input is needed, got none: name Parquet or JSONL files or folders"


@pytest.mark.parametrize("name", ["missing.parquet", ""])
def test_a_missing_file_is_refused(name: str) -> None:
    assert refusal(name) == f"an input must be a file, a folder or a glob, but there is nothing at {name!r}"


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1]) + "/b.parquet"
    assert refusal(path) == f"an input must be a file, a folder or a glob, but there is nothing at {path!r}"


def test_a_glob_without_matches_is_refused(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*.parquet")
    assert refusal(pattern) == f"an input must name at least one file, but nothing matches {pattern!r}"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == (
        f"a folder must hold Parquet or JSONL files, but there are none in {str(tmp_path)!r} "
        "(by their names, .parquet, .pq, .jsonl, .ndjson, .json; names that begin with _ or . do not count)"
    )


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.parquet.gz"])
def test_another_format_is_refused(tmp_path: Path, name: str) -> None:
    path = jsonl(tmp_path / name, "a")
    assert refusal(path) == (
        f"an input must be Parquet or JSONL, by its name, got {path!r}: "
        "known endings are .parquet, .pq, .jsonl, .ndjson, .json, and .gz or .zst after the last three"
    )


def test_an_unknown_protocol_is_refused() -> None:
    assert refusal("nowhere://a.parquet") == "nowhere://a.parquet cannot be opened: Protocol not known: nowhere"


# What identifies a file


def test_a_local_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1, 2])
    status = Path(path).stat()
    assert Dataset.resolve([path]).identity == [
        {"path": path, "size": status.st_size, "modified": status.st_mtime, "rows": 2}
    ]


def test_identity_changes_with_a_file_and_not_without(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1])
    before = Dataset.resolve([path]).identity
    assert Dataset.resolve([str(tmp_path)]).identity == before
    assert json.loads(json.dumps(before)) == before
    parquet(tmp_path / "a.parquet", a=[1, 2])
    assert Dataset.resolve([path]).identity != before


@pytest.mark.parametrize("way", ["memory://listing/a.jsonl", "memory://listing", "memory://listing/*.jsonl"])
def test_a_file_is_the_same_however_it_was_named(way: str) -> None:
    filesystem = fsspec.filesystem("memory")
    if not filesystem.exists("/listing/a.jsonl"):
        filesystem.pipe_file("/listing/a.jsonl", b"{}\n")
    created = filesystem.info("/listing/a.jsonl")["created"].timestamp()
    path = "memory:///listing/a.jsonl"
    assert Dataset.resolve([way]).identity == [{"path": path, "size": 3, "modified": created, "rows": 1}]


# Object stores


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    bucket = s3.bucket("listing")
    store = fsspec.filesystem("s3", **s3.storage_options)
    for name in ("a.jsonl", "data/b.jsonl", "data/x=1/c.jsonl", "data/_d.jsonl", "data/notes.txt"):
        store.pipe_file(f"{bucket}/{name}", b"{}\n")
    store.pipe_file(f"{bucket}/notes/a.txt", b"")
    return bucket


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/a.jsonl", ["a.jsonl"]),
        ("/data", ["data/b.jsonl", "data/x=1/c.jsonl"]),
        ("/data/", ["data/b.jsonl", "data/x=1/c.jsonl"]),
        ("", ["a.jsonl", "data/b.jsonl", "data/x=1/c.jsonl"]),
        ("/*/*.jsonl", ["data/b.jsonl"]),
        ("/**/*.jsonl", ["a.jsonl", "data/b.jsonl", "data/x=1/c.jsonl"]),
        ("/d*/x*", ["data/x=1/c.jsonl"]),
    ],
)
def test_objects_are_listed_like_files(s3: S3Server, bucket: str, path: str, names: list[str]) -> None:
    listed = find_files([bucket + path], s3.storage_options)
    assert [file.path for file in listed] == [f"{bucket}/{name}" for name in names]


def test_an_object_is_known_by_its_etag(s3: S3Server, bucket: str) -> None:
    [entry] = Dataset.resolve([f"{bucket}/a.jsonl"], s3.storage_options).identity
    assert entry == {"path": f"{bucket}/a.jsonl", "size": 3, "etag": '"8a80554c91d9fca8acb82f023de02f11"', "rows": 1}


def test_an_object_that_was_put_after_a_listing_is_found(s3: S3Server, bucket: str) -> None:
    store = fsspec.filesystem("s3", **s3.storage_options)
    for number in range(2):
        store.pipe_file(f"{bucket}/growing/{number}.jsonl", b"{}\n")
        assert Dataset.resolve([f"{bucket}/growing"], s3.storage_options).num_rows == number + 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/none.jsonl", "an input must be a file, a folder or a glob, but there is nothing at '{}'"),
        ("/*.parquet", "an input must name at least one file, but nothing matches '{}'"),
        (
            "/notes",
            "a folder must hold Parquet or JSONL files, but there are none in '{}' "
            "(by their names, .parquet, .pq, .jsonl, .ndjson, .json; names that begin with _ or . do not count)",
        ),
    ],
)
def test_what_is_not_on_a_store_is_refused(s3: S3Server, bucket: str, path: str, text: str) -> None:
    assert refusal(bucket + path, storage_options=s3.storage_options) == text.format(bucket + path)


@pytest.mark.parametrize("path", ["s3://nobody/a.parquet", "s3://nobody/*.parquet"])
def test_a_missing_bucket_is_refused(s3: S3Server, path: str) -> None:
    text = refusal(path, storage_options=s3.storage_options)
    assert text == (
        f"{path} cannot be read: The specified bucket does not exist: create the bucket or name another one"
    )


def test_a_store_that_refuses_is_quoted(s3: S3Server, bucket: str) -> None:
    s3.troubles[:] = [Trouble(403, "AccessDenied")]
    text = refusal(f"{bucket}/a.jsonl", storage_options=s3.storage_options)
    assert text == f"{bucket}/a.jsonl cannot be read: Forbidden: check the credentials and what they allow"


def test_a_store_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits)))
    options: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:1", "key": "testkey", "secret": "testsecret"}
    assert refusal("s3://away/a.jsonl", storage_options=options) == (
        's3://away/a.jsonl cannot be read: Could not connect to the endpoint URL: "http://127.0.0.1:1/away/a.jsonl": '
        "check the endpoint and the network, and run the same command again"
    )
    assert sum(waits) == pytest.approx(5)


def test_a_footer_that_cannot_be_read_is_refused_before_anything_is_started(s3: S3Server, bucket: str) -> None:
    s3.troubles[:] = [None, Trouble(403, "AccessDenied")]
    text = refusal(f"{bucket}/a.jsonl", storage_options=s3.storage_options)
    assert text == f"{bucket}/a.jsonl cannot be read: in trouble: check the credentials and what they allow"
