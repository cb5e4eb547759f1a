# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests to the routes under /relay, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.prompts import conversation_tokens_async, text_tokens_async
from vllm_relay.serving.access import check_access

if TYPE_CHECKING:
    from starlette.datastructures import State
    from typing_extensions import Self


class PromptRequest(BaseModel):
    """A body with one of the forms of a prompt."""

    _FORMS: ClassVar[tuple[str, ...]] = ("text", "messages", "prompt_token_ids")

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]] | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if sum(getattr(self, name) is not None for name in self._FORMS) != 1:
            *others, last = self._FORMS
            raise ValueError(f"expected one of {', '.join(others)} and {last}")
        return self


async def tokens_of_request(state: State, request: PromptRequest) -> list[int]:
    """The tokens with which prompts begin that begin like this one.

    Raises:
        CommandError: they cannot be found.
    """
    if request.text is not None:
        return await text_tokens_async(state.engine_client.renderer, request.text)
    if request.messages is not None:
        return await conversation_tokens_async(state.online_renderer, request.messages)
    return request.prompt_token_ids or []


def route_path(scope: Any) -> str:
    """The path of a request without the prefix under which a proxy has the server; "" where the
    scope is no request."""
    if scope["type"] != "http":
        return ""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if path.startswith(f"{root}/") else path


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The body of a request, of which no more is read than it may have.

    Raises:
        CommandError: it has more.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise CommandError(413, too_long(max_bytes))
    return bytes(body)


def too_long(max_bytes: int) -> str:
    """What to say of a body with markup that has more bytes."""
    return (
        f"the body has more than {max_bytes} bytes: shorten it, or raise "
        "additional_config.relay.max_markup_bytes"
    )


class RelayRoute(APIRoute):
    """Says in ``request.state.relay_owner`` who asks, if that may be; answers CommandErrors, and
    bodies that are not what was expected or do not come, as vLLM does its errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                request.state.relay_owner = check_access(request)
                return await handle(request)
            except ValidationError as error:
                return error_response(400, describe(error))
            except CommandError as error:
                return error_response(error.status, str(error))
            except ClientDisconnect:
                return error_response(400, "the connection was closed before the body had ended")

        return answer


def relay_router() -> APIRouter:
    """For routes under /relay."""
    return APIRouter(prefix="/relay", tags=["relay"], route_class=RelayRoute)


def error_response(status: int, message: str) -> JSONResponse:
    """In the form of vLLM's errors."""
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError"}
    kinds |= {404: "NotFoundError", 409: "ConflictError"}
    kinds |= {413: "RequestEntityTooLargeError", 422: "UnprocessableEntityError"}
    kinds |= {429: "TooManyRequestsError", 501: "NotImplementedError"}
    kinds |= {500: "InternalServerError", 507: "InsufficientStorageError"}
    message = message.encode("utf-8", "backslashreplace").decode()  # of lone surrogates
    error = {"message": message, "type": kinds.get(status, "Error"), "code": status}
    return JSONResponse({"error": error}, status)


def describe(error: ValidationError) -> str:
    """The first of what is wrong: a prompt may have a thousand bad tokens."""
    first, *others = error.errors(include_url=False, include_input=False)
    where = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    more = f"; and {len(others)} more" if others else ""
    return f"{where}: {reason}{more}" if where else f"{reason}{more}"
