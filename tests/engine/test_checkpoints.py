"""Where a model's files are found, and how GGUF files are converted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import checkpoints
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.loader import load_model
from llmbatch.errors import ModelError
from llmbatch.system.cache import cache_folder
from tests.support.gguf_files import write_gguf
from tests.support.models import tiny_model_folder

untyped: Any = AutoModelForCausalLM


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    assert resolve_model(folder) == folder


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == (
        f"model folder {str(tmp_path)!r} holds neither config.json nor a .gguf file: name a folder that "
        "save_pretrained wrote"
    )


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path / "model.bin"))
    assert str(caught.value) == (
        f"model must be a folder, a .gguf file or a hub name, got the file {str(tmp_path / 'model.bin')!r}: "
        "name its folder"
    )


def test_a_gguf_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("junk.gguf")
    assert str(caught.value) == "model file 'junk.gguf' is not there: check its path"


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("./models/of/nobody")
    assert str(caught.value) == (
        "model must be a folder, a .gguf file or a name on the hub, got './models/of/nobody': check its spelling"
    )


def test_a_hub_name_without_a_network_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(model: str) -> list[str]:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(checkpoints, "_hub_files", no_network)
    with pytest.raises(ModelError) as caught:
        resolve_model("nobody/nothing-at-all")
    assert str(caught.value) == (
        "model 'nobody/nothing-at-all' is no folder here and cannot be fetched: Name or service not known: "
        "name a local folder, or try again with a network"
    )


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from huggingface_hub import HfApi

    never = threading.Event()
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: never.wait(30))
    monkeypatch.setattr(checkpoints, "_HUB_SECONDS", 0.01)
    with pytest.raises(ModelError, match="cannot be fetched: the hub did not answer in 0 seconds"):
        resolve_model("nobody/nothing-at-all")
    never.set()


def test_a_gguf_file_without_its_readers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == "reading m.gguf needs the package gguf: pip install gguf"


def test_a_broken_gguf_file_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert list((cache_folder() / "gguf").iterdir()) == []


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path))
    assert Path(folder).parent == tmp_path / "cache" / "gguf"
    assert load_model(folder, dtype="float32", platform=HOST).eos_token_ids == (2,)
    assert AutoConfig.from_pretrained(folder).dtype == torch.float32
    monkeypatch.setattr(checkpoints, "start_beside", None)
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder


def test_what_another_conversion_made_of_a_gguf_file_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf")
    before = resolve_model(str(tmp_path))
    monkeypatch.setattr(checkpoints, "_CONVERSION", checkpoints._CONVERSION + 1)
    after = resolve_model(str(tmp_path))
    assert after != before
    assert Path(before).is_dir()


def test_a_conversion_goes_on_where_its_job_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf")
    program = f"from llmbatch.engine.model.checkpoints import resolve_model; resolve_model({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as job:
        while not any((tmp_path / "cache").glob("gguf/.converting-*")):  # the other process works
            assert job.poll() is None
        job.kill()
    folder = resolve_model(str(tmp_path))  # waits for the same conversion
    names = [file.name for file in (tmp_path / "cache" / "gguf").iterdir()]
    assert names == [Path(folder).name]
