"""What clients send, checked: chat completions as OpenAI has them, with documents, and documents by themselves."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

GREEDY_BELOW = 1e-3
"""Temperatures below this decode greedily; logits divided by less may not be numbers any more."""
STOPS_MAX = 4

Filled = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class Given(BaseModel):
    """What is unknown is refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class DocumentGiven(Given):
    """A document by its id, or with its text, which is stored before the answer."""

    id: Filled | None = None
    text: Filled | None = None


class StreamOptions(Given):
    """What a stream holds beside the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(Given):
    """The one form of answers."""

    type: Literal["text"]


ASKS_FOR_NOTHING = {
    "n": "1",
    "logprobs": "false",
    "top_logprobs": "0",
    "logit_bias": "{}",
    "frequency_penalty": "0",
    "presence_penalty": "0",
    "response_format": '{"type": "text"}',
    "modalities": '["text"]',
    "tools": "[]",
    "tool_choice": '"none"',
    "functions": "[]",
    "function_call": '"none"',
    "stream_options.include_obfuscation": "false",
}
"""The values that fields may have that kvdb does not serve, as JSON."""


class ChatRequest(Given):
    """A request for a chat completion. documents, recompute: beside what OpenAI has. What stands behind `user` changes no answer,
    and what stands behind `n` is taken with the values that ask for nothing. A field that is null is one that is left out."""

    model: Filled
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    documents: list[Filled | DocumentGiven] = []
    recompute: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Filled | Annotated[list[Filled], Field(max_length=STOPS_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for a stream; set stream to true")
        return self

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of the answer, None where nothing is said."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what the answer took."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages, as the templates of open models know their roles."""
        return [{**one, "role": "system"} if one.get("role") == "developer" else one for one in self.messages]

    @property
    def docs(self) -> list[str | dict[str, str | None]]:
        """The documents, as an engine takes them."""
        return [one if isinstance(one, str) else {"id": one.id, "text": one.text} for one in self.documents]

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of `generate` that say how a token is chosen; none of them leaves it to the model's own configuration."""
        if self.temperature is not None and self.temperature < GREEDY_BELOW:
            return {"do_sample": False}
        if self.temperature is None and self.top_p is None:
            return {}
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        return {"do_sample": True, "temperature": temperature, "top_p": float(self.top_p or 1.0), "top_k": 0}


class DocumentRequest(Given):
    """A document's text, and how long it stays: seconds, whether it may be dropped for room, and metadata of the
    application's own. None leaves what there is."""

    text: Filled
    ttl: Annotated[float, Field(gt=0)] | None = None
    pinned: bool | None = None
    metadata: dict[str, Any] | None = None
