"""Converts a model's folder to a GGUF file by llama.cpp's own converter.

    python benchmarks/peers/gguf_file.py LLAMA_CPP FOLDER FILE [--type bf16]

LLAMA_CPP is its source, as the source package of llama-cpp-python has it in vendor/llama.cpp. The converter knows a
tokenizer by what it makes of one text, and refuses the others. Here any is converted as Qwen2's, since the benchmark
sends tokens and never text. It needs torch, transformers and sentencepiece.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib import import_module
from pathlib import Path


def convert(source: Path, folder: Path, file: Path, kind: str) -> None:
    """Run the converter in this process."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import_module("conversion.base").TextModel.get_vocab_base_pre = lambda *_: "qwen2"
    sys.argv[1:] = [str(folder), "--outtype", kind, "--outfile", str(file)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a model's folder to a GGUF file.")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="bf16", choices=("bf16", "f16", "f32", "q8_0"))
    options = parser.parse_args()
    convert(options.source, options.folder, options.file, options.type)
