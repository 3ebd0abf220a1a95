"""Answers the requests of lm-evaluation-harness: `lm_eval --model llmbatch --model_args pretrained=M,dtype=float32`.

The harness hands over all requests of one kind at once, so each call is one table: contexts that requests share (the
examples of a task, a question with several choices) are found by the prefix tree and computed once, and nothing is
generated to score a text. What a score means is the harness's own code: where a context ends and its continuation
begins (`TemplateLM`), the windows of long texts, and what of a generated text counts.

`llmbatch._namespaces` registers the model under its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Unpack

import pyarrow as pa
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    truncate_tokens,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from llmbatch.inference.keywords import EngineArgs
from llmbatch.inference.options import Options
from llmbatch.inference.progress import choose
from llmbatch.inference.worker import Worker

_IDS: Final = pa.list_(pa.int32())


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness is shipped without types
    """A model for lm-evaluation-harness, by the names that its `hf` model has.

    `pretrained` is a folder, a .gguf file or a hub name. `max_length` is the most tokens of context and continuation
    together; longer contexts lose their beginning. `prefix_token_id` stands before texts that have no context, by
    default the tokenizer's bos, or eos where there is none. `chat_template_args` and `enable_thinking` are passed to
    the chat template, and what is before `think_end_token` is cut off answers. How the model is run is said by the
    options of the engine (docs/options.md), such as `dtype` and `kv_memory`. Batch sizes are taken and not needed.
    Raises `InputError` for wrong options, and `JobError` where a request cannot be answered.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **engine: Unpack[EngineArgs],
    ) -> None:
        super().__init__()
        given: EngineArgs = {**engine, "device": _device(engine.get("device", "auto"))}
        if max_length is not None:
            given["context_length"] = max_length
        options = Options.build(
            model=pretrained, prompt="prompt", sampling_params="sampling", on_error="raise", **given
        )
        self._progress = choose(quiet=False)
        self._writer = Worker.open(options, self._progress)
        self._scorer = self._writer.asking(sampling_column=None, continuation="continuation")
        special: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        trusted = bool(engine.get("trust_remote_code"))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self._writer.folder, trust_remote_code=trusted, **special)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._prefix = self.tokenizer.decode(self.prefix_token_id)
        self._name = pretrained
        self.max_length = self._writer.model.context_length
        self.max_gen_toks = max_gen_toks
        self.think_end_token = think_end_token
        self.chat_template_args = {**(chat_template_args or {})}
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id):
            if token is not None:
                return int(token)
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness keeps requests made with the chat template."""
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat of any number of turns; without `add_generation_prompt` its last message is gone on with."""
        rendered: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )
        return rendered

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text; special tokens go around it unless it begins with them already."""
        special = add_special_tokens
        if special is None and has_bos_prefix(string, self._prefix):
            special = False
        elif special is None:
            special = self._add_bos_token
        ids: list[int] = self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))
        return ids

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, cut into windows of `max_length` tokens that overlap by one."""
        asked, owners = [], []
        for row, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                asked.append((None, context, continuation))
                owners.append(row)
        sums = [0.0] * len(requests)
        for row, (score, _) in zip(owners, self._loglikelihood_tokens(asked), strict=True):
            sums[row] += score
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        # The last token is not fed to the model, so there is room for one more.
        contexts = [before[-max(self.max_length + 1 - len(after), 1) :] for _, before, after in requests]
        table = _table(contexts, continuation=pa.array([after for _, _, after in requests], _IDS))
        scored = self._scorer.answer(table, self._progress).table
        logprobs = scored["continuation_logprob"].to_pylist()
        scores = list(zip(logprobs, scored["continuation_is_greedy"].to_pylist(), strict=True))
        for (text, _, _), score in zip(requests, scores, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, score)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate the answer to each context, up to the first of its stop strings."""
        if not requests:
            return []
        eos = self.tokenizer.decode(self.eot_token_id)
        contexts, sampling, stops = [], [], []
        for context, given in (request.args for request in requests):
            params = normalize_gen_kwargs(given, self.max_gen_toks)
            until, most = params.pop("until"), params.pop("max_gen_toks")
            contexts.append(truncate_tokens(self.tok_encode(context), self.max_length - most))
            sampling.append(json.dumps(self._sampling(params, until, most)))
            stops.append(handle_stop_sequences([*until], eos))
        answered = self._writer.answer(_table(contexts, sampling=pa.array(sampling)), self._progress).table
        texts = [
            postprocess_generated_text(text, stop, self.think_end_token)
            for text, stop in zip(answered["generated_text"].to_pylist(), stops, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling(self, params: Mapping[str, Any], until: Iterable[str], most: int) -> dict[str, Any]:
        """Say the harness's parameters by the names of `SamplingParams`, which refuses those it does not know."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in added if token.special}
        stop = [text for text in until if text and text not in special]
        ids = [special[text] for text in until if text in special]  # what decoded text does not show
        rest = {name: value for name, value in params.items() if name != "do_sample"}
        return {**rest, "max_tokens": most, "stop": stop, "stop_token_ids": ids}


def _table(contexts: list[list[int]], **columns: pa.Array) -> pa.Table:
    return pa.table({"prompt": pa.array(contexts, _IDS), **columns})


def _device(asked: str) -> str:
    """Return the device to run on: the harness asks for a GPU where nobody asked for a device, and may have none."""
    import torch

    return asked if torch.cuda.is_available() or not asked.startswith("cuda") else "auto"
