"""Where an output may lie, and what may be there already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llmbatch.errors import DataError
from tests.support.outputs import finish, open_output
from tests.support.s3 import S3Server, s3_fixture  # noqa: F401

WAY_OUT = "choose another name, or replace it with overwrite=True (--overwrite)"


def refusal(url: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_output(url, **options)
    return str(caught.value)


def not_free(url: Path | str, *, replace_foreign: bool) -> str:
    with pytest.raises(DataError) as caught:
        open_output(url).check_free(replace_foreign=replace_foreign)
    return str(caught.value)


# Names


@pytest.mark.parametrize(
    "name",
    [
        *("out.csv", "out.json", "out.parquet.gz", "out.ndjson.zst", "s3://bucket/out.arrow"),
        *("out.jsonl.bz2", "out.jsonl.xz", "out.JSONL", "out.Parquet"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    url = name if "://" in name else str(tmp_path / name)
    assert refusal(name) == (
        f"an output must be a folder, or a file that ends in .parquet, .jsonl, .jsonl.gz, .jsonl.zst, got {url!r}"
    )


def test_an_output_has_a_name() -> None:
    assert refusal("") == "an output must be a path or a URL, got ''"
    stdout = "an output must be a path or a URL, got '-': the standard output takes no rows, name a file"
    assert refusal("-") == stdout


def test_an_output_of_a_protocol_that_nobody_knows_is_refused() -> None:
    assert refusal("nowhere://a/out") == "nowhere://a/out cannot be opened: Protocol not known: nowhere"


def test_a_local_output_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("out", "./out/", "a/../out", f"file://{tmp_path}/out"):
        output = open_output(name)
        assert output.url == str(tmp_path / "out")
        assert output.work.url == str(tmp_path / "out" / "_llmbatch")
    assert open_output("out.jsonl").work.url == str(tmp_path / "out.jsonl._llmbatch")


@pytest.mark.parametrize(
    ("url", "work"),
    [
        ("memory://out", "memory://out/_llmbatch"),
        ("memory://out/", "memory://out/_llmbatch"),
        ("memory://a/b/out.jsonl.gz", "memory://a/b/out.jsonl.gz._llmbatch"),
        ("memory://out.parquet", "memory://out.parquet._llmbatch"),
    ],
)
def test_work_lies_on_the_same_store(url: str, work: str) -> None:
    output = open_output(url)
    assert output.url == url.rstrip("/")
    assert output.work.url == work
    assert output.work.root == work.removeprefix("memory:/")


# Apart from the inputs


def test_an_output_must_not_be_an_input(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    (tmp_path / "link.parquet").symlink_to(path)
    text = "the output must not be an input, got {}: choose another name"
    assert refusal(path, inputs=[str(path)]) == text.format(path)
    assert refusal(path, inputs=[f"file://{path}"]) == text.format(path)
    link = tmp_path / "link.parquet"
    assert refusal(link, inputs=[str(path)]) == text.format(link)


def test_an_output_must_lie_apart_from_the_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    text = "the output must lie apart from the inputs, but {} is {} {}: choose another place"
    inside = folder / "out"
    assert refusal(inside, inputs=[str(folder)]) == text.format(inside, "inside", folder)
    file = folder / "a.parquet"
    assert refusal(folder, inputs=[str(file)]) == text.format(folder, "around", file)


def test_so_it_must_on_an_object_store(s3: S3Server) -> None:
    bucket = s3.bucket("apart")
    text = "the output must lie apart from the inputs, but {} is {} {}: choose another place"
    for url, where, given in (
        (f"{bucket}/data/out", "inside", f"{bucket}/data/"),
        (f"{bucket}/data/out.jsonl", "inside", bucket),
        (f"{bucket}/data", "around", "s3a://apart/data/a.parquet"),
        (bucket, "around", "simplecache::s3://apart/a.parquet"),
    ):
        assert refusal(url, inputs=[given], storage_options=s3.storage_options) == text.format(url, where, given)
    url = f"{bucket}/a.parquet"
    assert refusal(url, inputs=["s3://apart/a.parquet"], storage_options=s3.storage_options) == (
        f"the output must not be an input, got {url}: choose another name"
    )
    for given in ("s3://other/data", "s3://apart/data2", "/apart/data", "memory://apart/data"):
        open_output(f"{bucket}/data/out", inputs=[given], storage_options=s3.storage_options)


def test_inputs_elsewhere_do_not_matter(tmp_path: Path) -> None:
    open_output(tmp_path / "out", inputs=["s3://bucket/a.parquet", str(tmp_path / "a.parquet"), f"{tmp_path}/out2"])


# A place that takes it


@pytest.mark.parametrize("url", ["s3://", "s3:///", "gs://"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    assert refusal(url) == (
        f"an output must have a bucket or a host, got {url!r}: give it as {url.partition(':')[0]}://NAME/FOLDER"
    )


def test_the_form_of_what_is_there_must_be_that_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").mkdir()
    (tmp_path / "out").write_text("")
    assert refusal(tmp_path / "out.parquet") == (
        f"the output {tmp_path / 'out.parquet'} must be a file by its name, but a folder is there"
    )
    assert refusal(tmp_path / "out") == (
        f"the output {tmp_path / 'out'} must be a folder by its name, but a file is there"
    )


def test_a_folder_in_the_stead_of_a_file_is_refused_on_an_object_store_too(s3: S3Server) -> None:
    bucket = s3.bucket("forms")
    finish(f"{bucket}/deep/out.parquet/out", storage_options=s3.storage_options)
    url = f"{bucket}/deep/out.parquet"
    assert refusal(url, storage_options=s3.storage_options) == (
        f"the output {url} must be a file by its name, but a folder is there"
    )


@pytest.mark.parametrize("name", ["notes.txt", "folder", "records.json"])
def test_what_no_job_wrote_is_not_taken_for_work(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / "out" / "_llmbatch" / name
    foreign.mkdir(parents=True)
    assert refusal(tmp_path / "out") == f"{foreign} was written by no job, and would go when one ends: move it away"
    assert foreign.exists()


@pytest.mark.parametrize("is_link", [True, False])
def test_work_is_kept_in_a_folder_of_its_own(tmp_path: Path, is_link: bool) -> None:
    work = tmp_path / "out" / "_llmbatch"
    for folder in (work.parent, tmp_path / "elsewhere"):
        folder.mkdir()
    if is_link:
        work.symlink_to(tmp_path / "elsewhere")
    else:
        work.write_text("a thesis")
    said = f"{work}, where jobs keep their work, must be a folder and no link: move what is there away"
    assert refusal(tmp_path / "out") == said


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_a_link_to_nothing_is_no_output(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    out.symlink_to(tmp_path / "nothing")
    assert refusal(out) == f"the output {out} must not be a link to nothing: remove it, or name its target"


@pytest.mark.parametrize("name", ["a::b", "a::b.jsonl", "file::c/d"])
def test_colons_in_a_path_are_no_chain_of_urls(tmp_path: Path, name: str) -> None:
    finish(tmp_path / name)
    assert (tmp_path / name).exists()
    there = {path.name for path in tmp_path.iterdir()}
    assert there - {f"{name}._llmbatch.json"} == {name.partition("/")[0]}


def test_a_file_in_the_way_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "deep" / "out"
    assert refusal(out) == f"the output {out} must lie in a folder, but {tmp_path / 'file'} is a file"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    out = tmp_path / "new" / "out"
    assert refusal(out) == f"the output {out} must lie where it can be written, but {tmp_path} cannot"


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_a_bucket_that_is_not_there_is_refused(s3: S3Server, name: str) -> None:
    url = f"s3://no-such-bucket/a/{name}"
    assert refusal(url, storage_options=s3.storage_options) == (
        f"{url} cannot be listed: The specified bucket does not exist: create the bucket or name another one"
    )


# What may be there


def test_what_lies_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    open_output(tmp_path / "out").check_free(replace_foreign=False)
    for name in ("out/a.parquet", "out.parquet", "out.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    assert not_free(tmp_path / "out", replace_foreign=False) == (
        f"the output {tmp_path / 'out'} is not empty, it holds a.parquet: {WAY_OUT}"
    )
    for name in ("out.parquet", "out.jsonl.gz"):
        assert not_free(tmp_path / name, replace_foreign=False) == (
            f"the output {tmp_path / name} is already there: {WAY_OUT}"
        )
        open_output(tmp_path / name).check_free(replace_foreign=True)
    open_output(tmp_path / "out").check_free(replace_foreign=True)


@pytest.mark.parametrize("name", ["thesis.tex", "photos", "a.parquet"])
def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert not_free(tmp_path / "out", replace_foreign=True) == (
        f"only Parquet files are overwritten, but {tmp_path / 'out'} also holds {name}: choose another folder"
    )


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.jsonl"])
def test_an_output_of_llmbatch_is_no_foreign_thing(tmp_path: Path, name: str) -> None:
    finish(tmp_path / name)
    open_output(tmp_path / name).check_free(replace_foreign=False)
