# SPDX-License-Identifier: Apache-2.0
"""The server's routes for pinned prompts, as an endpoint plug-in of vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_relay.modules.online import ModularPrompt, store_of
from vllm_relay.prefix_cache.pin_client import (
    Pin,
    command_async,
    conversation_tokens_async,
    pin_tokens_async,
    text_tokens_async,
)
from vllm_relay.prefix_cache.pins import PinError
from vllm_relay.prefix_cache.system_prompts import pin_system_prompts_async

if TYPE_CHECKING:
    from argparse import Namespace

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


class PinRequest(PromptRequest):
    """The body of ``POST /relay/pins``."""

    _FORMS: ClassVar[tuple[str, ...]] = ("text", "messages", "prompt_token_ids", "relay")

    id: str | None = None
    relay: ModularPrompt | None = None


class PinEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(_router())

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Pin the configured system prompts; the server is not listening yet.

        Raises:
            ValueError: one cannot be pinned.
        """
        from vllm_relay.config import scheduler_is_selected

        if engine_client is not None and scheduler_is_selected(engine_client.vllm_config):
            await pin_system_prompts_async(engine_client, state.online_renderer)


def _router() -> APIRouter:
    router = APIRouter(prefix="/relay", tags=["relay"])

    @router.post("/pins", status_code=201)
    async def pin(raw_request: Request) -> Response:
        """Compute a prompt and keep its KV blocks."""
        try:
            request = PinRequest.model_validate_json(await raw_request.body())
        except ValidationError as error:
            return error_response(400, describe(error))
        try:
            return JSONResponse(asdict(await _pin(raw_request.app.state, request)), 201)
        except PinError as error:
            return error_response(error.status, str(error))

    @router.get("/pins")
    async def pins(raw_request: Request) -> Response:
        """The pinned prompts."""
        try:
            engine = raw_request.app.state.engine_client
            return JSONResponse({"pins": await command_async(engine, "pins", {})})
        except PinError as error:
            return error_response(error.status, str(error))

    @router.delete("/pins/{pin_id}", status_code=204)
    async def unpin(pin_id: str, raw_request: Request) -> Response:
        """Let the KV blocks of a prompt be evicted again."""
        try:
            engine = raw_request.app.state.engine_client
            await command_async(engine, "unpin", {"pin_id": pin_id})
        except PinError as error:
            return error_response(error.status, str(error))
        return Response(status_code=204)

    return router


async def tokens_of_request(state: State, request: PromptRequest) -> list[int]:
    """The tokens with which prompts begin that begin like this one.

    Raises:
        PinError: they cannot be found.
    """
    if request.text is not None:
        return await text_tokens_async(state.engine_client.renderer, request.text)
    if request.messages is not None:
        return await conversation_tokens_async(state.online_renderer, request.messages)
    return request.prompt_token_ids or []


async def _pin(state: State, request: PinRequest) -> Pin:
    if request.relay is not None:
        try:
            store = store_of(state.online_renderer)
        except ValueError as error:
            raise PinError(501, str(error)) from None
        try:
            rendered = request.relay.render(store)
        except ValueError as error:
            raise PinError(400, str(error)) from None
        return await pin_tokens_async(
            state.engine_client, rendered.token_ids, request.id, rendered.plan
        )
    token_ids = await tokens_of_request(state, request)
    return await pin_tokens_async(state.engine_client, token_ids, request.id)


def error_response(status: int, message: str) -> JSONResponse:
    """In the form of vLLM's errors."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError"}
    kinds |= {501: "NotImplementedError", 507: "InsufficientStorageError"}
    error = {"message": message, "type": kinds.get(status, "Error"), "code": status}
    return JSONResponse({"error": error}, status)


def describe(error: ValidationError) -> str:
    """The first of what is wrong: a prompt may have a thousand bad tokens."""
    first, *others = error.errors(include_url=False, include_input=False)
    where = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    more = f"; and {len(others)} more" if others else ""
    return f"{where}: {reason}{more}" if where else f"{reason}{more}"
