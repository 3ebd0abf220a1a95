"""Answers what Inspect asks: `inspect eval TASK --model llmbatch/Qwen/Qwen3-0.6B -M dtype=float32`.

Inspect (`inspect_ai`) runs the samples of an evaluation side by side, and each asks for one answer at a time. What is
waiting when the engine is free is answered as one table, so that what samples share is computed once: who comes first
answers for all who wait, in a thread, and the others find their answers there.

Inspect imports this module by an entry point. llmbatch's own libraries are imported when a model is made.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from anyio import Lock, sleep, to_thread
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from llmbatch.errors import JobError, ParameterError
from llmbatch.openai.logprobs import chat_logprobs

_GATHERING: Final = 0.02  # seconds in which samples that begin together have all asked
_SAMPLES: Final = 512  # that Inspect runs side by side, unless it is told otherwise
# Parameters that Inspect has by the same names.
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logit_bias", "frequency_penalty", "presence_penalty")


@dataclass(slots=True, eq=False)
class _Question:
    """What a sample waits for an answer to."""

    messages: str  # JSON text
    sampling: str  # likewise
    answer: dict[str, Any] | Exception | None = None


class InspectModel(ModelAPI):  # type: ignore[misc]  # Inspect is not installed where types are checked
    """A model for Inspect: a folder, a .gguf file or a hub name, with the options of `LLMOperator` (`-M NAME=VALUE`).

    What Inspect does not give is as those options have it: greedy, and 512 tokens at most. Texts that call a tool are
    not read, so tools are refused. Raises `InputError` for wrong options, and `JobError` where a sample cannot be
    answered.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        from llmbatch.inference.options import Options
        from llmbatch.operators.workers import worker_of

        asked: Any = {"messages": "messages", "sampling_params": "sampling", **options}
        self._shared = worker_of(Options.build(model=model_name, **asked))
        self._waiting: deque[_Question] = deque()
        self._engine = Lock()

    def max_connections(self) -> int:
        """Return how many samples run side by side."""
        return _SAMPLES

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a chat, together with all others that wait."""
        if tools:
            raise ParameterError(f"tools must be left out, got {tools[0].name}: texts that call them are not read")
        question = _Question(json.dumps([_message(one) for one in input]), json.dumps(_sampling(config)))
        self._waiting.append(question)
        async with self._engine:
            if question.answer is None:
                await sleep(_GATHERING)
                await to_thread.run_sync(self._answer)
        if isinstance(question.answer, Exception):
            raise question.answer
        assert question.answer is not None, "all who wait are answered"
        return _output(self.model_name, question.answer)

    def _answer(self) -> None:
        """Answer all that wait. Who waits and is cancelled has an answer that nobody takes."""
        import pyarrow as pa

        questions = [self._waiting.popleft() for _ in range(len(self._waiting))]
        asked = {"messages": [one.messages for one in questions], "sampling": [one.sampling for one in questions]}
        try:
            answers: list[Any] = self._shared.answer(pa.table(asked)).table.to_pylist()
        except Exception as error:  # raised by each who waits
            answers = [error] * len(questions)
        for question, answer in zip(questions, answers, strict=True):
            question.answer = answer


@modelapi(name="llmbatch")  # type: ignore[untyped-decorator]  # likewise
def model_class() -> type[InspectModel]:
    """Return the class of models whose names begin with llmbatch/."""
    return InspectModel


def _message(message: ChatMessage) -> dict[str, str]:
    parts = [] if isinstance(message.content, str) else [part.type for part in message.content]
    if not {*parts} <= {"text", "reasoning"}:
        raise ParameterError(f"messages must hold text alone, got {', '.join(parts)}")
    return {"role": message.role, "content": message.text}


def _sampling(config: GenerateConfig) -> dict[str, Any]:
    """Say Inspect's parameters by the names of `SamplingParams`."""
    found = {name: getattr(config, name) for name in _SAME} | {"stop": config.stop_seqs, "n": config.num_choices}
    if config.logprobs:
        found["logprobs"] = config.top_logprobs or 0
    if config.response_schema is not None:
        found["structured_outputs"] = {"json": config.response_schema.json_schema.model_dump(exclude_none=True)}
    return {name: value for name, value in found.items() if value is not None}


def _output(model: str, row: dict[str, Any]) -> ModelOutput:
    if row["error_kind"] == "too_long":
        return ModelOutput.from_content(model, "", stop_reason="model_length", error=row["error"])
    if row["error"] is not None:
        raise JobError(row["error"])
    choices = [
        ChatCompletionChoice(
            message=ChatMessageAssistant(content=one["text"], model=model, source="generate"),
            stop_reason="max_tokens" if one["finish_reason"] == "length" else "stop",
            logprobs=chat_logprobs(one["logprobs"]),
        )
        for one in row["choices"]
    ]
    given, made = row["num_input_tokens"], sum(one["num_generated_tokens"] for one in row["choices"])
    usage = ModelUsage(input_tokens=given, output_tokens=made, total_tokens=given + made)
    return ModelOutput(model=model, choices=choices, usage=usage)
