"""Outputs on an object store, which neither renames nor has folders."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError
from tests.support.dying import killed
from tests.support.outputs import TABLE, begun, commit, finish, open_output, stage
from tests.support.s3 import S3Server, Trouble, s3_fixture  # noqa: F401

NAMES = ("out", "out.parquet", "out.jsonl", "out.jsonl.gz", "out.jsonl.zst")


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.bucket("outputs")


class Store:
    """What is in a folder of the bucket."""

    def __init__(self, server: S3Server, url: str) -> None:
        self.server, self.url = server, url
        self.options: dict[str, Any] = {"storage_options": server.storage_options}
        self.files = fsspec.filesystem("s3", **server.storage_options, use_listings_cache=False)
        self.root = url.removeprefix("s3://")

    def names(self) -> list[str]:
        return sorted(path.removeprefix(f"{self.root}/") for path in self.files.find(self.root))

    def rows(self, name: str) -> int:
        """What a plain reader sees."""
        return int(ds.dataset(f"{self.root}/{name}", filesystem=self.files).count_rows())


@pytest.fixture
def store(s3: S3Server, bucket: str, request: pytest.FixtureRequest) -> Store:
    return Store(s3, f"{bucket}/{request.node.name}")


@pytest.mark.parametrize("name", NAMES)
def test_an_output_appears_when_it_is_whole_and_nothing_else_is_left(store: Store, name: str) -> None:
    url = f"{store.url}/{name}"
    with begun(url, **store.options) as output:
        parts = stage(output, TABLE)
        work = "out/_llmbatch/" if name == "out" else f"{name}._llmbatch/"
        assert all(key.startswith(work) for key in store.names())
        if name == "out":
            assert store.rows("out") == 0
        commit(output, parts)
    manifest = open_output(url, **store.options).manifest()
    assert manifest is not None
    if name == "out":
        assert store.names() == ["out/_llmbatch.parquet", "out/part-00000.parquet", "out/part-00001.parquet"]
        assert pq.read_table(f"{store.root}/out", filesystem=store.files).equals(TABLE)
    else:
        assert store.names() == [name, f"{name}._llmbatch.json"]
    tables = [pa.concat_tables(output.finished_tables(part["name"], TABLE.column_names)) for part in manifest["parts"]]
    assert pa.concat_tables(tables).equals(TABLE)


def test_a_commit_that_dies_between_a_copy_and_its_removal_is_gone_through_with(store: Store) -> None:
    url = f"{store.url}/out"
    for step in count():
        finish(url, TABLE.slice(2), **store.options)
        with begun(url, **store.options) as output:
            parts = stage(output, TABLE)
            if not killed(step, partial(commit, output, parts), changes=["move"]):
                break
        output = open_output(url, **store.options)
        assert output.has_work()
        with output.locked():
            output.resume_ending()
        assert store.names() == ["out/_llmbatch.parquet", "out/part-00000.parquet", "out/part-00001.parquet"]
        assert pq.read_table(f"{store.root}/out", filesystem=store.files).equals(TABLE)
        assert output.manifest() is not None
    assert step == 3


def test_a_job_that_starts_over_leaves_a_finished_output_alone(store: Store) -> None:
    url = f"{store.url}/out"
    finish(url, **store.options)
    whole = store.names()
    with begun(url, **store.options) as output:
        stage(output, TABLE)
        output.start_over()
        assert [key for key in store.names() if "lock" not in key] == [
            *whole[:1],
            "out/_llmbatch/names.json",
            *whole[1:],
        ]


def test_foreign_parts_are_replaced_and_nothing_else(store: Store) -> None:
    url = f"{store.url}/out"
    store.files.pipe_file(f"{store.root}/out/data.parquet", b"theirs")
    store.files.pipe_file(f"{store.root}/out/.hidden", b"theirs")
    output = open_output(url, **store.options)
    with pytest.raises(DataError, match=r"is not empty, it holds \.hidden: "):
        output.check_free(replace_foreign=False)
    output.check_free(replace_foreign=True)
    finish(url, TABLE.slice(2), **store.options)
    assert store.names() == ["out/.hidden", "out/_llmbatch.parquet", "out/part-00000.parquet"]


def test_credentials_that_are_refused_are_found_before_the_job(store: Store, s3: S3Server) -> None:
    url = f"{store.url}/out"
    s3.troubles += [Trouble(403, "AccessDenied")]
    with pytest.raises(DataError, match=rf"^{url} cannot be listed: .*: check the credentials and what they allow$"):
        open_output(url, **store.options)
    output = open_output(url, **store.options)
    s3.troubles += [Trouble(403, "AccessDenied")]
    with pytest.raises(DataError, match=r": check the credentials and what they allow$"), output.locked():
        pass
    assert store.names() == []
