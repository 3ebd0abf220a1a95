"""Every name that is given in a work folder is known there, and no other name is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.io.writing import work_files
from llmbatch.io.writing.work_files import WindowFiles, is_of_a_job

NUMBERS = st.integers(min_value=0, max_value=10**7)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_what_is_kept_of_windows_has_a_known_name(generation: int, window: int, part: int) -> None:
    files = WindowFiles(generation)
    journal, whole = files.journal(window), files.whole(window)
    assert all(map(is_of_a_job, (journal, f"{journal}-{part:06d}", whole)))
    assert is_of_a_job(work_files.staged(files.part(window, part), ".parquet"))
    assert files.windows([f"{journal}-{part:06d}"]) == files.windows([journal]) == ({window}, set())
    assert files.windows([journal, whole]) == (set(), {window})
    assert WindowFiles(generation + 1).windows([journal, whole]) == (set(), set())


@given(NUMBERS)
def test_a_part_of_rows_as_they_finish_is_found_by_its_keys(number: int) -> None:
    spool = work_files.spool(number)
    keys = work_files.keys(spool)
    assert is_of_a_job(keys)
    assert work_files.spools([keys, spool, work_files.JOB]) == [spool]


@pytest.mark.parametrize("name", ["notes.txt", "job.json.bak", "000-window-00000.json~", "keys", "part-00000.parquet"])
def test_a_name_that_no_job_gives_is_not_known(name: str) -> None:
    assert not is_of_a_job(name)
