"""What is said where a device or its kernels cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmbatch.engine import devices
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.devices import check_kernels, find_platform
from llmbatch.errors import ModelError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker

CPU = torch.device("cpu")


def refusal(device: str) -> str:
    with pytest.raises(ModelError) as caught:
        find_platform(device)
    return str(caught.value)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with one card, as far as torch says; what is changed here is changed there."""
    here: dict[str, Any] = {"count": 1, "capability": (9, 0), "error": None}

    def init() -> None:
        if here["error"]:
            raise RuntimeError(here["error"])

    monkeypatch.setattr(devices, "_CUDA", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here["count"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: here["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: here.update(current=device))
    return here


def test_a_card_is_used_where_there_is_one(card: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    assert find_platform("auto").device == find_platform("cuda").device == torch.device("cuda:0")
    assert find_platform("cpu") is HOST
    card["count"] = 0
    assert find_platform("auto") is HOST


def test_a_card_takes_more_rows_at_once_than_the_processor(card: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    assert find_platform("cuda").max_running == 2048
    assert HOST.max_running == 512


def test_a_card_is_entered_by_the_thread_that_launches_kernels(card: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    card["count"] = 2
    find_platform("cuda:1").enter()
    assert card["current"] == torch.device("cuda:1")


def test_cards_that_are_left_idle_are_told_of_unless_one_was_named(card: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    card["count"] = 2
    assert (
        find_platform("cuda").notes
        == find_platform("auto").notes
        == (
            "1 of the 2 GPUs that this process sees is used: --tensor-parallel shares a model between several, and "
            "map_dataset of llmbatch.operators.ray runs a copy on each",
        )
    )
    assert find_platform("cuda:0").notes == ()
    shared = find_platform("cuda", ranks=2)
    assert (shared.ranks, shared.notes) == (2, ())


def test_a_torch_for_the_processor_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CUDA", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert find_platform("auto") is HOST
    assert refusal("cuda") == (
        "device 'cuda' cannot be used: torch 2.13.0+cpu is built for the processor alone: install one that is built "
        "for CUDA; or take device='cpu' (--device cpu)"
    )


def test_a_driver_that_does_not_match_is_said_to(card: dict[str, Any]) -> None:
    card["error"] = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
    assert refusal("cuda") == (
        "device 'cuda' cannot be used: The NVIDIA driver on your system is too old (found version 11040): torch 2.13.0 "
        "needs a driver for CUDA 13.0; or take device='cpu' (--device cpu)"
    )


def test_a_card_that_is_not_there_is_said_not_to_be(card: dict[str, Any]) -> None:
    assert refusal("cuda:1") == (
        "device 'cuda:1' cannot be used: there are 1 GPUs here, numbered from 0: name one of them; or take "
        "device='cpu' (--device cpu)"
    )


def test_a_card_that_is_too_old_is_not_used_and_auto_says_so(card: dict[str, Any]) -> None:
    card["capability"] = (7, 5)
    reason = "NVIDIA X has compute capability 7.5, and the kernels need 8.0 (Ampere) or later: take a newer card"
    assert refusal("cuda") == f"device 'cuda' cannot be used: {reason}; or take device='cpu' (--device cpu)"
    found = find_platform("auto")
    assert found.is_host
    assert found.notes == (f"the model runs on the processor, since the GPU cannot be used: {reason}",)


def test_triton_that_is_missing_is_asked_for(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert refusal("cuda") == (
        "device 'cuda' cannot be used: its kernels are written in Triton, which is not installed: pip install triton; "
        "or take device='cpu' (--device cpu)"
    )


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (EngineConfig(attention="flash-attn"), "attention must be auto"),
        (EngineConfig(overlap="interleaved"), "overlap must be auto or sequential"),
    ],
)
def test_a_processor_has_no_kernels_of_a_card(config: EngineConfig, rule: str) -> None:
    with pytest.raises(ParameterError, match=rf"^{rule} on a processor, which has kernels of its own, got '"):
        check_kernels(HOST, config)


def test_a_job_on_a_processor_refuses_kernels_of_a_card(model: str) -> None:
    with pytest.raises(ParameterError, match=r"^attention must be auto on a processor"):
        Worker.open(Options.build(model=model, prompt="text", attention="varlen", device="cpu"))


# Attention


def test_an_attention_that_does_not_work_makes_way_aloud_unless_it_was_asked_for() -> None:
    pytest.importorskip("triton")
    from llmbatch.engine.attention_choice import choose_attention
    from llmbatch.kernels.spec import AttentionSpec
    from llmbatch.kernels.triton.backend import TritonAttention

    spec = AttentionSpec(layer=0, query_heads=4, heads=2, width=16, scale=0.25, window=0, softcap=0.0)

    class Wrong(TritonAttention):
        """Twice the answer."""

        def attend(self, *arguments: Any) -> torch.Tensor:
            return 2 * super().attend(*arguments)

    def broken(device: torch.device) -> TritonAttention:
        raise RuntimeError("ptxas failed\nat line 3")

    makers: Any = {"triton": broken, "varlen": Wrong, "flash-attn": TritonAttention}
    given: Any = {"dtype": torch.float32, "kv_dtype": torch.float32, "device": CPU, "page_size": 16, "makers": makers}
    backend, notes = choose_attention("auto", [spec], **given)
    assert type(backend) is TritonAttention
    assert notes == (
        "attention 'triton' is not used: ptxas failed",
        "attention 'varlen' is not used: of 4 query and 2 KV heads of 16 elements in float32 it gave answers that are "
        "wrong by 1.0e+00",
    )
    with pytest.raises(ModelError) as caught:
        choose_attention("triton", [spec], **given)
    assert str(caught.value) == (
        "attention 'triton' cannot be used here: ptxas failed; or take attention='auto' (--attention auto)"
    )


def test_an_attention_that_reads_no_pages_of_8_bits_says_so() -> None:
    pytest.importorskip("triton")
    from llmbatch.engine.attention_choice import choose_attention
    from llmbatch.kernels.flash_attn import FlashAttention, plan_lengths
    from llmbatch.kernels.interface import AttentionPlan, BatchLayout
    from llmbatch.kernels.spec import AttentionSpec

    class Installed(FlashAttention):
        """As if its package were there."""

        def __init__(self) -> None:
            pass

        def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
            return plan_lengths(layout, page_size)

    spec = AttentionSpec(layer=0, query_heads=4, heads=2, width=16, scale=0.25, window=0, softcap=0.0)
    makers: Any = {"flash-attn": lambda device: Installed()}
    given: Any = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "device": CPU, "page_size": 16}
    with pytest.raises(ModelError) as caught:
        choose_attention("flash-attn", [spec], **given, makers=makers)
    assert str(caught.value) == (
        "attention 'flash-attn' cannot be used here: flash-attn reads no pages of float8_e4m3fn here: take "
        "attention='triton' (--attention triton); or take attention='auto' (--attention auto)"
    )
    backend, notes = choose_attention("auto", [spec], **given)
    assert (type(backend).__name__, notes) == ("TritonAttention", ())


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float8_e4m3fn)])
def test_an_attention_whose_recorded_steps_are_wrong_is_not_taken(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from llmbatch.engine.attention_choice import choose_attention
    from llmbatch.kernels.spec import AttentionSpec
    from llmbatch.kernels.triton.backend import PaddedLaunches, TritonAttention
    from llmbatch.kernels.triton.side_stream import SideStream

    class Wrong(PaddedLaunches):
        """Twice the answer."""

        def attend(self, *arguments: Any) -> torch.Tensor:
            return 2 * super().attend(*arguments)

    def half_wrong(device: torch.device) -> TritonAttention:
        made = TritonAttention(device)
        made.padded = Wrong(device, SideStream(device))
        return made

    spec = AttentionSpec(layer=0, query_heads=2, heads=1, width=16, scale=0.25, window=0, softcap=0.0)
    makers: Any = {"triton": half_wrong, "varlen": TritonAttention}
    given: Any = {"dtype": dtype, "kv_dtype": kv_dtype, "device": CPU, "page_size": 16, "makers": makers}
    backend, notes = choose_attention("auto", [spec], **given)
    assert type(backend.padded) is PaddedLaunches  # type: ignore[attr-defined]
    assert notes == (
        "attention 'triton' is not used: of 2 query and 1 KV heads of 16 elements in "
        f"{str(dtype).removeprefix('torch.')} it gave answers that are wrong by 1.0e+00",
    )
    with pytest.raises(ModelError, match=r"^attention 'triton' cannot be used here: .* gave answers that are wrong"):
        choose_attention("triton", [spec], **given)


def test_a_library_that_is_missing_is_asked_for() -> None:
    pytest.importorskip("triton")
    from llmbatch.engine.attention_choice import choose_attention

    with pytest.raises(ModelError) as caught:
        choose_attention("flash-attn", [], dtype=torch.float32, kv_dtype=torch.float32, device=CPU, page_size=16)
    assert str(caught.value) == (
        "attention 'flash-attn' cannot be used here: flash-attn is not installed: pip install flash-attn; or take "
        "attention='auto' (--attention auto)"
    )
