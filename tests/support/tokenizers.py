"""Small tokenizers of real kinds, saved as a model's folder would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from llmbatch.errors import RowError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

# Each message as "<role>content"; a chat of more than one system message is refused.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{{ '<' + message.role + '>' }}{{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if shout %}!{% endif %}"
)


def save_fast(folder: Path, *, chat_template: str | None = None) -> str:
    """A byte-level BPE tokenizer that puts <s> before a text: one token a byte, ids 0 to 255, <s> 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    # What some published files ask for, and nobody running a model over a dataset wants.
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_slow(folder: Path) -> str:
    """ByT5's tokenizer, written in Python: a byte is its value plus 3, </s> (1) ends a text."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(folder)
    return str(folder)


def texts_of(source: PromptSource, table: pa.Table, tokenizer: Tokenizer) -> list[str | RowError]:
    """The text of each row, or its error."""
    rendered = source.render(table, tokenizer)
    assert rendered.chat == source.renders_chat
    assert sorted(rendered.errors) == [row for row, text in enumerate(rendered.texts) if text is None]
    return [rendered.errors[row] if text is None else text for row, text in enumerate(rendered.texts)]
