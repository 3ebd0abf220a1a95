"""Spare rows of a batch: requests that arrive are written into them in place, so that nothing is numbered anew.

Whatever has an entry for each request (lengths, marks, sampling columns) has one for each spare row already. So a
request that arrives costs the write of a row in each, and the copy of its prompt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams


class SpareRows:
    """The last rows of a batch (`RequestBatch.with_spare`), taken one by one."""

    def __init__(self, requests: RequestBatch, first: int) -> None:
        """Take the rows of a batch from the `first` on, which are empty."""
        self.requests: RequestBatch = requests  # replaced when parameters are added; its arrays stay
        self._next = first
        self._rows, self._tokens = len(requests), len(requests.tokens)  # where there is no more room
        self._numbers = {params: number for number, params in enumerate(requests.params)}

    def has_room(self, tokens: int) -> bool:
        """Tell whether a row is left, and room for a prompt of so many tokens."""
        return self._next < self._rows and int(self.requests.offsets[self._next]) + tokens <= self._tokens

    def limit(self, rows: int, tokens: int) -> None:
        """Take no more than so many rows from now on, and prompts of so many tokens together."""
        self._rows = min(self._rows, self._next + rows)
        self._tokens = min(self._tokens, int(self.requests.offsets[self._next]) + tokens)

    def take_row(self, requests: RequestBatch, request: int) -> int:
        """Write a request of another batch into the next row; returns the row. There must be room."""
        begin, end = requests.offsets[request : request + 2].tolist()
        params = requests.params[requests.params_index[request]]
        most, serial = int(requests.max_tokens[request]), int(requests.serial[request])
        return self.take(requests.tokens[begin:end], most, params, serial)

    def take(self, prompt: NDArray[np.int32], max_tokens: int, params: SamplingParams, serial: int) -> int:
        """Write a request into the next row; returns the row. There must be room."""
        row, number = self._next, self._numbers.get(params)
        self._next += 1
        if number is None:
            number = self._numbers[params] = len(self.requests.params)
            self.requests = replace(self.requests, params=(*self.requests.params, params))
        requests, begin = self.requests, int(self.requests.offsets[row])
        end = begin + len(prompt)
        requests.tokens[begin:end] = prompt
        requests.offsets[row + 1 :] = end
        requests.max_tokens[row] = requests.recorded[row] = max_tokens
        requests.params_index[row] = number
        requests.serial[row] = serial
        requests.scored[row] = len(prompt) if params.prompt_logprobs is None else min(1, len(prompt))
        return row
