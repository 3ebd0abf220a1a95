"""One more token for each of some sequences, in one compiled call: where there is room, and which end with it."""

from __future__ import annotations

from typing import Any, Final

from llmbatch.compilation.decorators import compiled
from llmbatch.scheduler.output import FinishReason

_RUNNING: Final = int(FinishReason.RUNNING)
_STOP: Final = int(FinishReason.STOP)
_LENGTH: Final = int(FinishReason.LENGTH)
_ERROR: Final = int(FinishReason.ERROR)


@compiled
def find_room(slots: Any, lengths: Any, queued: Any) -> tuple[int, int]:
    """Find the highest of some `slots`, and the most tokens that one of them has.

    `lengths` and `queued` int32 [slots that are there] are tokens; other slots have none.
    """
    highest = most = 0
    for slot in slots:
        highest = max(highest, slot)
        if slot < lengths.size:
            most = max(most, lengths[slot], queued[slot])
    return highest, most


@compiled
def append_tokens(
    generated: Any, lengths: Any, slots: Any, requests: Any, tokens: Any, finite: Any, most: Any, min_tokens: Any,
    params_index: Any, ignore_eos: Any, eos: int, endings: Any, offsets: Any, finished: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Append a token to each of `slots` int32 [n], and write into `finished` uint8 [n] which have ended, and why.

    By slot: `generated` int32 [slots, tokens], `lengths` int32. By request: `most` and `min_tokens`, int32, and
    `params_index`, which record of parameters it has. By record: `ignore_eos` bool, and the tokens that end an answer,
    endings[offsets[i]:offsets[i + 1]], of which the first `eos` end the answer of any record that does not ignore them.
    A sample that is not `finite` bool [n] is an error.
    """
    for i in range(slots.size):
        slot, request, token = slots[i], requests[i], tokens[i]
        generated[slot, lengths[slot]] = token
        lengths[slot] += 1
        finished[i] = _LENGTH if lengths[slot] >= most[request] else _RUNNING
        if lengths[slot] >= min_tokens[request]:
            params = params_index[request]
            for j in range(offsets[params] + (eos if ignore_eos[params] else 0), offsets[params + 1]):
                if endings[j] == token:
                    finished[i] = _STOP
        if not finite[i]:
            finished[i] = _ERROR
