"""The two forms of `llmbatch simulate`."""

from __future__ import annotations

import pytest

from llmbatch.cli.main import main


def test_with_online_simulate_has_the_policies_of_online_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--online", "bros-lmsys", "--policy", "dfs"]) == 2
    assert "must be one of fcfs, round-robin, priority, bros, ooco, slack" in capsys.readouterr().err


def test_without_it_a_policy_is_still_an_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "trace.parquet", "--policy", "bros"]) == 2
    assert "must be one of blend, dual-scan, dfs" in capsys.readouterr().err


def test_both_forms_say_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flag in ((["simulate"], "--order"), (["simulate", "--online", "x"], "--offline")):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert flag in capsys.readouterr().out
