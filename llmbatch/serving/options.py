"""What an endpoint is asked: where it listens, what its requests may wait for, and what it refuses.

This module imports nothing heavy. Annotations are evaluated here, unlike elsewhere, since the command line reads them.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Required, TypedDict

from llmbatch.arguments import INT32_MAX, check_names, finite, path, refusal, text, whole
from llmbatch.choices import Keyword
from llmbatch.errors import ParameterError
from llmbatch.inference.keywords import EngineArgs

_MOST_PORT = 2**16 - 1


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Everything about an endpoint but its model. Raises ParameterError."""

    host: str = "127.0.0.1"
    port: int = 8000
    ttft: float = 1.0  # seconds within which the first token of a request is wanted
    tpot: float | None = None  # most seconds of a step
    api_key_file: str | os.PathLike[str] | None = None
    max_tokens: int = 512  # of an answer whose request does not say
    max_body: int = 2**25  # bytes
    max_upload: int = 2**29  # bytes
    header_timeout: float = 30.0  # seconds, in which the headers of a request are whole
    body_timeout: float = 30.0  # seconds, in which a body comes on by a MiB or ends
    max_waiting: int = 1024
    max_connections: int = 4096
    state_dir: str | os.PathLike[str] | None = None
    grace: float = 20.0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        text("host", self.host)
        set_(self, "port", whole("port", self.port, 0, _MOST_PORT))
        for name in ("max_tokens", "max_body", "max_upload", "max_waiting", "max_connections"):
            set_(self, name, whole(name, getattr(self, name), 1, *((INT32_MAX,) if name == "max_tokens" else ())))
        for name in ("ttft", "tpot", "header_timeout", "body_timeout"):
            if name != "tpot" or self.tpot is not None:
                set_(self, name, finite(name, getattr(self, name)))
                if getattr(self, name) <= 0:
                    raise refusal(name, "be above 0 seconds", getattr(self, name))
        set_(self, "grace", finite("grace", self.grace))
        if self.grace < 0:
            raise refusal("grace", "be at least 0 seconds", self.grace)
        for name in ("api_key_file", "state_dir"):
            if getattr(self, name) is not None:
                set_(self, name, path(name, getattr(self, name)))


_DEFAULT = ServingOptions()


class ServingArgs(TypedDict, total=False):
    """The fields of `ServingOptions`."""

    host: Annotated[str, Keyword("the address that is listened at; 0.0.0.0: all", _DEFAULT.host, metavar="H")]
    port: Annotated[int, Keyword("the port that is listened at; 0: one that is free", _DEFAULT.port, metavar="P")]
    ttft: Annotated[
        float, Keyword("within this time the first token of a request is wanted", _DEFAULT.ttft, metavar="SECONDS")
    ]
    tpot: Annotated[
        float | None,
        Keyword("most time of a step, and so between two tokens of an answer", means="no limit", metavar="SECONDS"),
    ]
    api_key_file: Annotated[
        str | os.PathLike[str] | None,
        Keyword("a file of keys, one a line, of which a request must have one", means="no key", metavar="F"),
    ]
    max_tokens: Annotated[
        int, Keyword("most tokens of an answer where a request does not say", _DEFAULT.max_tokens, metavar="N")
    ]
    max_body: Annotated[int, Keyword("most bytes of a request", _DEFAULT.max_body, metavar="BYTES")]
    max_upload: Annotated[int, Keyword("most bytes of a file for a batch", _DEFAULT.max_upload, metavar="BYTES")]
    header_timeout: Annotated[
        float,
        Keyword("time in which the headers of a request must come", _DEFAULT.header_timeout, metavar="SECONDS"),
    ]
    body_timeout: Annotated[
        float,
        Keyword("time in which a body must come on by a MiB, or end", _DEFAULT.body_timeout, metavar="SECONDS"),
    ]
    max_waiting: Annotated[
        int, Keyword("most answers that may wait for their first token", _DEFAULT.max_waiting, metavar="N")
    ]
    max_connections: Annotated[int, Keyword("most connections", _DEFAULT.max_connections, metavar="N")]
    state_dir: Annotated[
        str | os.PathLike[str] | None,
        Keyword("a folder for files and batches", means="one for each model in the cache folder", metavar="D"),
    ]
    grace: Annotated[
        float, Keyword("seconds that what is running has to end after SIGTERM", _DEFAULT.grace, metavar="S")
    ]


class ServeArgs(ServingArgs, EngineArgs, total=False):
    """The keywords of `serve`."""

    model: Required[Annotated[str | os.PathLike[str], Keyword("a folder, a .gguf file or a hub name", metavar="M")]]


def split_options(options: dict[str, Any]) -> tuple[ServingOptions, dict[str, Any]]:
    """Split the keywords of `serve` into options of the endpoint and of the rest. Raises ParameterError."""
    if options.get("output_tokens") is not None:
        raise refusal("output_tokens", "be left out, since no table is answered", options["output_tokens"])
    check_names(options, [name for name in ServeArgs.__annotations__ if name != "output_tokens"])
    if "model" not in options:
        raise ParameterError("model must be given: a folder, a .gguf file or a hub name", option="model")
    own = {name: value for name, value in options.items() if name in ServingArgs.__annotations__}
    serving = ServingOptions(**own)
    rest = {name: value for name, value in options.items() if name not in own}
    return serving, {**rest, "max_tokens": serving.max_tokens}
