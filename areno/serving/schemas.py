"""Request schemas of the chat and text completion endpoints, with the supported fields.

Undeclared fields are ignored, but undeclared fields of messages are passed to the chat template. Declared fields are validated
strictly, and ``null`` means unset. The fields are those of OpenAI's API, and common extensions of other servers: ``top_k``,
``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``, ``return_token_ids`` and ``chat_template_kwargs``.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from areno.serving.errors import ApiError
from areno.types.sampling import MAX_TOP_LOGPROBS

MAX_SAMPLES = 128
"""Maximum number of samples per request, for all prompts of the request together."""

MAX_TOOLS, MAX_MESSAGES = 512, 10_000
MAX_DEPTH, MAX_VALUES = 100, 100_000
"""The maximum nesting depth of a request, and the maximum number of strings, lists and objects in a request."""

Stop = Annotated[str, Field(min_length=1, max_length=4096)]
TokenId = Annotated[int, Field(ge=0)]


class StrictSchema(BaseModel):
    """Base of every schema. Types are strict, and numbers must be finite. By default, undeclared fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class RequestBody(StrictSchema):
    """Base of generation requests. The size of a request is checked before its fields are validated."""

    _characters: int = PrivateAttr(0)

    @property
    def characters(self) -> int:
        """Total number of characters of all strings in the request body."""
        return self._characters

    @model_validator(mode="wrap")
    @classmethod
    def _measured(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        characters = measure(value)
        body = handler(value)
        body._characters = characters
        return body


def measure(value: Any) -> int:
    """Count the characters of all strings in a JSON value. Raises ApiError 400 if the JSON value is too large or nested too
    deeply."""
    characters = values = depth = 0
    level = [value]
    while level:
        depth, values = depth + 1, values + len(level)
        if depth > MAX_DEPTH:
            raise ApiError(
                400, f"the body is nested more than {MAX_DEPTH} levels deep; flatten the body", code="body_too_deep"
            )
        if values > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES} strings, lists and objects; send fewer values"
            raise ApiError(400, message, code="body_too_large")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                characters += len(one)
            elif isinstance(one, dict):
                characters += sum(map(len, one))
                below += [inner for inner in one.values() if isinstance(inner, str | dict | list)]
            elif isinstance(one, list):
                below += [inner for inner in one if isinstance(inner, str | dict | list)]
        level = below
    return characters


class StreamOptions(StrictSchema):
    """The field ``stream_options``."""

    include_usage: bool | None = None


class GenerationBody(RequestBody):
    """Fields of chat and text completion requests: model, sampling and response options."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None

    @property
    def samples(self) -> int:
        """Number of samples per prompt."""
        return self.n or 1

    def with_defaults(self, defaults: dict[str, Any]) -> Self:
        """Return a copy, with unset fields filled from ``defaults``."""
        return self.model_copy(update={name: value for name, value in defaults.items() if getattr(self, name) is None})

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatMessage(StrictSchema):
    """A message. Undeclared fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as a dictionary for chat templates."""
        values = self.model_dump(exclude_unset=True)
        values["role"] = "system" if self.role == "developer" else self.role
        return {"content": None, **values}


class FunctionDeclaration(StrictSchema):
    """A function available to the model."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclaration(StrictSchema):
    """An element of the field ``tools``."""

    type: Literal["function"]
    function: FunctionDeclaration


class FunctionName(StrictSchema):
    """The function that a ``tool_choice`` requires by name."""

    name: str


class NamedTool(StrictSchema):
    """A ``tool_choice`` that requires the tool named in ``function``."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(StrictSchema):
    """The schema of a ``response_format`` of type ``json_schema``."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, populate_by_name=True)

    name: str = "answer"
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictSchema):
    """The field ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolDeclaration], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None


class RewardRequest(StrictSchema):
    """Body of ``POST /rl/set_reward``. Only servers that record agents' conversations for training have this endpoint."""

    reward: float
    interaction_id: str | None = None
