"""What a request may ask, field by field.

A field is served; or accepted and of no effect, because it says nothing about the answer (`IGNORED`); or accepted with
the value that changes nothing, which many clients send, and refused by name with any other (`NEUTRAL`); or unknown, and
refused by name as well. Nothing that was asked for is left out in silence.

Beyond OpenAI's fields, as vLLM calls them: top_k, min_p, min_tokens, stop_token_ids, ignore_eos, skip_special_tokens,
include_stop_str_in_output, add_special_tokens, return_token_ids, return_tokens_as_token_ids, and for chats
add_generation_prompt, continue_final_message, chat_template_kwargs. A number that must be whole may come as 2.0.
`prompt_token_ids` is a chat's prompt as token ids, in the place of `messages`; see tokens.py for those of a message.
`prompt_logprobs` (true, or 0 as vLLM's) asks for those of the prompt's own tokens, a number above 0 for the likeliest
at each of its positions too; with `echo`, `logprobs` does, and `max_tokens` 0 asks for nothing else. Our own:
`return_rollout` puts {"token_ids", "logprobs", "raw_logprobs", "weight_versions", "seed"} beside each choice's text,
what a trainer needs: every log-probability as the engine's own fp32 number, at the sampling temperature and at 1.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import from_json

from ..config import MAX_STOP_TOKEN_IDS, SamplingParams
from .errors import APIError

MAX_STOPS = 16
# Read by nobody here.
IGNORED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "parallel_tool_calls",
    "cache_salt",  # no bit of an answer depends on what the cache has
    "include_reasoning",  # nothing parses an answer
)
# field -> values that ask for nothing; null is one always.
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "early_stopping": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),  # of a text; a chat's go to the template, and so does reasoning_effort
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "vllm_xargs": ({},),
    "regex": (),
    "ebnf": (),
    "lora_path": (),
    "structured_outputs": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "priority": (0,),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted: there is none


class _Sampled(_Strict):
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    best_of: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Int | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_rollout: bool | None = None
    prompt_logprobs: bool | Int | None = None


class CompletionRequest(_Sampled):
    """POST /v1/completions. `prompt`: a text, token ids, or several of either."""

    prompt: Any
    max_tokens: Int | None = None
    logprobs: bool | Int | None = None
    echo: bool | None = None


class ClassifyRequest(_Strict):
    """POST /classify. `input`: a text, token ids, or several of either. use_activation false: scores as they are."""

    input: Any
    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None


class _Templated(_Strict):
    """What the model's chat template takes beside the messages."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(_Sampled, _Templated):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    prompt_token_ids: list[int] | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class TokenizeRequest(_Templated):
    """POST /tokenize: a text, or a chat's messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize. `prompt`: a text, which comes back as its tokens have it."""

    model: str | None = None
    tokens: list[int] | None = None
    prompt: str | list[int] | None = None


def parse(kind: type[_Strict], raw: bytes) -> Any:
    """A body as one of the above. APIError (400) names the first field that is wrong, and what was expected."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise APIError(400, f"the body is a {type(body).__name__}, expected an object", code="invalid_json")
    for name in list(body):
        if name in kind.model_fields:
            continue
        if name in NEUTRAL:
            check_neutral(name, body.pop(name), NEUTRAL[name])
        elif name in IGNORED:
            del body[name]
        else:
            raise APIError(400, f"{name}: there is no such field here", param=name, code="unknown_parameter")
    stops = body.get("stop_token_ids")
    if isinstance(stops, list) and len(stops) > MAX_STOP_TOKEN_IDS:  # before each of millions is looked at
        message = f"stop_token_ids: got {len(stops)}, expected at most {MAX_STOP_TOKEN_IDS}"
        raise APIError(400, message, param="stop_token_ids", code="invalid_value")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        field = str(first["loc"][0]) if first["loc"] else None
        raise APIError(400, f"{where}: {first['msg']}", param=field, code="invalid_value") from None
    if isinstance(asked, _Sampled):
        check_neutral("best_of", asked.best_of, (1 if asked.n is None else asked.n,))
    return asked


def check_neutral(name: str, value: Any, neutral: tuple) -> None:
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    served = " or ".join([*(repr(one) for one in neutral), "null"])
    raise APIError(400, f"{name}: this is not served: expected {served}", param=name, code="unsupported_parameter")


_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_top_logprobs": "logprobs"}


def sampling(request: _Sampled, max_new_tokens: int, top_logprobs: int, of_prompt: int | None) -> SamplingParams:
    """The engine's parameters, with OpenAI's defaults. What the engine refuses is a 400 that names the field.

    of_prompt   how many of the likeliest tokens at each of the prompt's positions; None: no log-probabilities of it
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    stop = [string for string in stop if string]  # an empty one asks for nothing
    if len(stop) > MAX_STOPS:
        raise APIError(400, f"stop: got {len(stop)} strings, expected at most {MAX_STOPS}", param="stop")
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "n": request.n,
        # OpenAI's seeds are signed: the same 64 bits
        "seed": request.seed % 2**64 if request.seed is not None and -(2**63) <= request.seed < 0 else request.seed,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "min_new_tokens": request.min_tokens,
        "skip_special_tokens": request.skip_special_tokens,
        "include_stop_str_in_output": request.include_stop_str_in_output,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(
            **given,
            stop=stop,
            max_new_tokens=max_new_tokens,
            num_top_logprobs=top_logprobs,
            prompt_logprobs=of_prompt is not None,
            num_prompt_top_logprobs=of_prompt or 0,
        )
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).removeprefix("SamplingParams: ").partition(" ")
        name = _NAMES.get(name, name)
        raise APIError(400, f"{name} {rest}", param=name, code="invalid_value") from None
