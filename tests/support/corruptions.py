"""Work folders of jobs that were killed, and then cut, swapped or edited at random."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np

from llmbatch.errors import LLMBatchError
from tests.support.setups import Case, Failure, Kill, forked, read

CUT, SWAPPED, EDITED, REPLACED = "cut", "swapped", "edited", "replaced"


class Corruption(Case):
    """A set-up whose command is killed, whose work is corrupted, and whose command is run again."""

    def corrupt(self, rng: np.random.Generator) -> str:
        """What became of it: `refused`, or `recovered`, or `none` where nothing was left to corrupt.

        Raises Failure where rows were wrong, or an error was none of ours, or there was no way out.
        """
        while True:
            self.begin_at(rng)
            kill = Kill(int(rng.integers(self.operations // 4, self.operations)), bool(rng.random() < 0.5))
            forked(functools.partial(self.command, kill, self.setup.flags))
            if self.work.is_dir() and (done := _damage(self.work, rng)):
                break
            shutil.rmtree(self.at)
        (self.folder / "victim").write_text("precious")
        try:
            told: str = forked(self._run_corrupted)
            if told:
                forked(self._start_over)
        except Failure as failure:
            raise Failure(f"{self.setup}, {kill}, {done}, in {self.at}: {failure}") from None
        if (self.folder / "victim").read_text() != "precious":
            raise Failure(f"{self.setup}, {kill}, {done}: another file was touched")
        shutil.rmtree(self.at)
        return "refused" if told else "recovered"

    def _run_corrupted(self) -> str:
        """What the plain command says; nothing where it has done all."""
        try:
            self.execute()
        except LLMBatchError as error:
            return str(error)
        self._compare()
        return ""

    def _start_over(self) -> None:
        """The way out, of which one is there whatever was damaged."""
        for flag in ("restart", "overwrite"):
            try:
                self.execute(**{flag: True})
            except LLMBatchError as error:
                lock = re.match(r"(.*) is not a lock of this version of llmbatch: remove it", str(error))
                if lock is not None:
                    Path(lock[1]).unlink()
                    self.execute(overwrite=True)
                    break
                if flag == "overwrite" or "(--overwrite)" not in str(error):
                    raise
            else:
                break
        self._compare()

    def _compare(self) -> None:
        found = read(self.out)
        if found == self.expected_old():
            return
        if sorted(found, key=str) != sorted(self.expected, key=str):
            raise Failure(
                f"silent: of {len(self.expected)} rows there are {len(found)}: {[row['id'] for row in found]}"
            )


def _damage(work: Path, rng: np.random.Generator) -> str | None:
    """Damage one or two files; what was done, None where nothing can be."""
    files = sorted(path for path in work.iterdir() if path.is_file() and path.stat().st_size)
    if not files:
        return None
    path = files[int(rng.integers(len(files)))]
    other = files[int(rng.integers(len(files)))]
    data = path.read_bytes()
    kind = (CUT, SWAPPED, EDITED, REPLACED)[int(rng.integers(4))]
    if kind == CUT:
        path.write_bytes(data[: int(rng.integers(len(data)))])
    elif kind == SWAPPED and other != path:
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{path.name} and {other.name} swapped"
    elif kind == REPLACED and path.suffix == ".json" and (text := _other_value(data, rng)) is not None:
        path.write_bytes(text)
    else:
        kind, at = EDITED, int(rng.integers(len(data)))
        path.write_bytes(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    return f"{path.name} {kind}"


def _other_value(data: bytes, rng: np.random.Generator) -> bytes | None:
    """The same JSON with another value under one of its names."""
    try:
        content = json.loads(data)
    except ValueError:  # it was damaged before
        return None
    names = [name for name in content if name != "checksum"]
    values = [0, -1, 10**30, "", "../../victim", None, [], {}, ["../victim"], {"../victim": []}, True, 1.5]
    if not names:
        return None
    content[names[int(rng.integers(len(names)))]] = values[int(rng.integers(len(values)))]
    return json.dumps(content).encode()
