"""`Refused`: a request that gets an error, with its status and OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse

from llmbatch.arguments import shown
from llmbatch.errors import RowError
from llmbatch.openai.answers import brief, invalid_request
from llmbatch.openai.texts import valid_text

_KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_SERVER_ERROR = 500


class Refused(Exception):
    """Why a request has no answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(valid_text(brief(message)))
        self.status = status
        self.param = None if param is None else valid_text(brief(param))
        self.code = code
        self.headers = headers

    @classmethod
    def of(cls, url: str, error: RowError) -> Refused:
        """Make the error of a request to a url whose row has one."""
        if error.kind in ("engine", "timeout"):
            return cls(_SERVER_ERROR, error.message, code=error.kind)
        told = invalid_request(url, error.message, error.kind)
        return cls(400, told["message"], param=told["param"], code=told["code"])

    @property
    def body(self) -> dict[str, object]:
        """The error in OpenAI's form."""
        fallback = "server_error" if self.status >= _SERVER_ERROR else "invalid_request_error"
        kind = _KINDS.get(self.status, fallback)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body, self.status, self.headers)


async def respond(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that was refused."""
    assert isinstance(error, Refused)
    return error.response


def unknown(what: str, name: str, param: str) -> Refused:
    """Make the error of a name that is that of nothing here."""
    return Refused(404, f"{param} must be that of {what}, got {shown(name)}", param=param, code="not_found")


def ending() -> Refused:
    """Make the error of a request that comes while the server ends."""
    return Refused(503, "the server is ending: ask another one", code="server_ending", headers={"Retry-After": "1"})


def not_kept(what: str, error: OSError) -> Refused:
    """Make the error of something that cannot be written to the folder of files and batches."""
    reason = (error.strerror or str(error)).lower()
    return Refused(500, f"the {what} cannot be kept ({reason}): have room made in the server's state_dir")
