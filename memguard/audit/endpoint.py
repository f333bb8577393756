"""Continuations of prompts from an OpenAI-compatible completions endpoint, such as vLLM or llama.cpp serve.

One request a continuation, several at a time, each retried a bounded number of times. When the endpoint stays away, what had
come back is kept and marked as a part. Prompts go out as token ids, so that they end where they were cut, or as text. The key
goes into one header and nowhere else: redirects are not followed, and no message quotes a key, a prompt or an answer.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from memguard.audit.decoding import (
    DecodingSettings,
    Generation,
    Generations,
    Prompt,
    check_prompts,
    sample_seed,
    whole_characters,
)
from memguard.errors import EndpointError, InputError

FIRST_WAIT = 1.0  # seconds before the second attempt; doubled each time
MAX_WAIT = 60.0  # seconds: an endpoint that asks for more is away
MAX_ANSWER = 16 * 2**20  # bytes
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_NAMED = 5


@dataclass(frozen=True)
class Endpoint:
    """Where continuations are asked for.

    Args:
        url: base of the interface, such as `http://localhost:8000/v1`.
        model: name the server knows the model by.
        api_key: sent as a bearer token; None sends none.
        send: ids, of the model's own tokenizer, or text, for servers that take no ids.
        timeout_s: seconds one attempt may take.
        max_attempts: of one continuation.
        num_parallel: requests under way at a time.

    Raises:
        InputError: an address that is none, or holds a password; a key that no header can carry; a number that is not above 0.

    Example:
        >>> Endpoint("http://localhost:8000/v1/", "small", api_key="k").completions
        'http://localhost:8000/v1/completions'
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    send: Literal["ids", "text"] = "ids"
    timeout_s: float = 120.0
    max_attempts: int = 4
    num_parallel: int = 8

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if (
            not (host and _is_token(self.url))
            or parts.scheme not in ("http", "https")
            or parts.query
            or parts.fragment
            or port == 0
        ):
            raise InputError("the endpoint must be an address such as http://localhost:8000/v1, without a query.")
        if parts.username is not None or parts.password is not None:
            raise InputError("the endpoint's address must hold no user or password; name a variable that holds the key.")
        if self.api_key is not None and not _is_token(self.api_key):
            raise InputError("the key of the endpoint must be printable letters without blanks.")
        for name in ("timeout_s", "max_attempts", "num_parallel"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0, got {getattr(self, name)}.")

    @property
    def completions(self) -> str:
        """Where completions are asked for."""
        return f"{self.url.rstrip('/')}/completions"

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc


def api_key_from(environment: Mapping[str, str], variable: str | None) -> str | None:
    """The key that a variable of the environment holds; None where none is named.

    Args:
        environment: variables of this process.
        variable: the name.

    Raises:
        InputError: the variable is not set, or holds what no header can carry; its value is not quoted.
    """
    if variable is None:
        return None
    key = environment.get(variable, "").strip()
    if not key:
        raise InputError(f"variable '{variable}' must hold the key of the endpoint, got nothing.")
    if not _is_token(key):
        raise InputError(f"variable '{variable}' must hold a key of printable letters without blanks.")
    return key


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def generate_at_endpoint(
    endpoint: Endpoint, prompts: Sequence[Prompt], tokenizer: Any, decoding: DecodingSettings, *, seed: int = 0
) -> Generations:
    """What a served model writes behind prompts, up to `max_new_tokens` tokens each.

    Args:
        endpoint: where to ask.
        prompts: as for `generate_with_model`; sent as text, those without one are left out and a notice says so.
        tokenizer: of the model, for the ids of what came back; they may differ from those the server wrote.
        decoding: how many continuations, how long, and how they are drawn.
        seed: of the draws; a server may ignore it.

    Returns:
        `Generations`; `stopped` says why some are missing, where the endpoint stayed away half-way.

    Raises:
        ValueError: a prompt without tokens, or two of one name.
        EndpointError: it refuses, serves another model, answers with what is no completion, or nothing came back at all.
    """
    check_prompts(prompts)
    notices = _check_model(endpoint)
    chosen = [place for place, prompt in enumerate(prompts) if endpoint.send == "ids" or prompt.text is not None]
    if len(chosen) < len(prompts):
        notices.append(f"{len(prompts) - len(chosen)} prompts cannot be sent as text and were left out.")
    rows = [(place, sample) for place in chosen for sample in range(decoding.num_continuations)]
    answers, stopped = _ask_all(endpoint, prompts, rows, decoding, seed)
    if stopped is not None and not answers:
        raise stopped
    items = tuple(
        Generation(place, sample, _ids(tokenizer, text), text, is_ended)
        for (place, sample), (text, is_ended) in ((row, answers[row]) for row in rows if row in answers)
    )
    sentence = f"{stopped} {len(items)} of {len(rows)} continuations had come back." if stopped is not None else None
    return Generations(items, decoding.max_new_tokens, len(rows), sentence, tuple(notices))


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


Row = tuple[int, int]
Answer = tuple[str, bool]


def _ask_all(
    endpoint: Endpoint, prompts: Sequence[Prompt], rows: Sequence[Row], decoding: DecodingSettings, seed: int
) -> tuple[dict[Row, Answer], EndpointError | None]:
    """Answers by row, and what ended the asking before all had come."""
    answers: dict[Row, Answer] = {}
    stop, failure = threading.Event(), None
    with ThreadPoolExecutor(max_workers=endpoint.num_parallel) as pool:
        pending = {}
        for place, sample in rows:
            body = _body(endpoint, prompts[place], decoding, sample_seed(prompts[place], sample, seed))
            pending[pool.submit(_ask, endpoint, body, stop)] = (place, sample)
        try:
            for done in as_completed(pending):
                try:
                    answer = done.result()
                except EndpointError as error:
                    failure = failure or error
                    continue
                if answer is not None:
                    answers[pending[done]] = answer
        finally:
            stop.set()
    return answers, failure


def _body(endpoint: Endpoint, prompt: Prompt, decoding: DecodingSettings, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": list(prompt.ids) if endpoint.send == "ids" else (prompt.text or "").rstrip(" "),
        "max_tokens": decoding.max_new_tokens,
        "temperature": 0.0 if decoding.is_greedy else decoding.temperature,
        "top_p": 1.0 if decoding.is_greedy else decoding.top_p,
        "seed": seed,
    }
    if decoding.top_k is not None and not decoding.is_greedy:
        body["top_k"] = decoding.top_k
    return body


def _ask(endpoint: Endpoint, body: dict[str, Any], stop: threading.Event) -> Answer | None:
    """One continuation, in as many attempts as are allowed; a failure ends those of all. None: another's did."""
    try:
        return _try(endpoint, body, stop)
    except EndpointError:
        stop.set()
        raise


def _try(endpoint: Endpoint, body: dict[str, Any], stop: threading.Event) -> Answer | None:
    for attempt in range(endpoint.max_attempts):
        if stop.is_set():
            return None
        try:
            return _completion(endpoint, _call(endpoint, endpoint.completions, body))
        except _Passing as passing:
            wait = passing.wait if passing.wait is not None else min(MAX_WAIT, FIRST_WAIT * 2**attempt)
            if attempt + 1 == endpoint.max_attempts or wait > MAX_WAIT:
                asked = f" and asks to wait {wait:.0f} seconds" if wait > MAX_WAIT else ""
                raise EndpointError(
                    f"endpoint {endpoint.host} {passing.reason}{asked}, at attempt {attempt + 1} of {endpoint.max_attempts}."
                ) from None
            stop.wait(wait)
    return None


class _Passing(Exception):
    """What another attempt may mend. `wait`: seconds the endpoint asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key, and the prompts, to another place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _call(endpoint: Endpoint, url: str, body: dict[str, Any] | None) -> Any:
    """The JSON that a request is answered with."""
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "memguard"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with _opener(endpoint).open(request, timeout=endpoint.timeout_s) as response:
            text = _read(response, endpoint)
    except urllib.error.HTTPError as error:
        raise _refusal(endpoint, error) from None
    except TimeoutError:
        raise _Passing(f"gave no answer within {endpoint.timeout_s:g} seconds") from None
    except urllib.error.URLError as error:
        slow = isinstance(error.reason, TimeoutError)
        said = f"gave no answer within {endpoint.timeout_s:g} seconds" if slow else "cannot be reached"
        raise _Passing(said) from None
    except (OSError, http.client.HTTPException):
        raise _Passing("broke off its answer") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Passing("answered with what is no JSON") from None


def _opener(endpoint: Endpoint) -> urllib.request.OpenerDirector:
    handlers: list[Any] = [_NoRedirect()]
    if urlsplit(endpoint.url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _read(response: Any, endpoint: Endpoint) -> bytes:
    """The whole answer: the limit on one wait for bytes does not bound an answer that comes in drops."""
    end, parts, size = time.monotonic() + endpoint.timeout_s, [], 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > end:
            raise TimeoutError
        if size > MAX_ANSWER:
            raise EndpointError(f"endpoint {endpoint.host} answers with more than {MAX_ANSWER // 2**20} MiB.")
    return b"".join(parts)


def _refusal(endpoint: Endpoint, error: urllib.error.HTTPError) -> Exception:
    """What a status other than 200 means."""
    with error:
        if error.code in PASSING:
            return _Passing(f"answers with status {error.code}", _retry_after(error.headers.get("Retry-After")))
        kind = _kind_of(error)
    if error.code in (401, 403):
        hint = "It refuses the key." if endpoint.api_key is not None else "It wants a key: name the variable that holds it."
    elif error.code == 404:
        hint = f"It knows no model '{endpoint.model}', or has no completions at this address."
    elif 300 <= error.code < 400:
        hint = "Redirects are not followed; give the address it points to."
    else:
        hint = "It takes no such request; see its log. Servers that take no token ids need text."
    return EndpointError(f"endpoint {endpoint.host} answers with status {error.code}{kind}. {hint}")


def _kind_of(error: urllib.error.HTTPError) -> str:
    """The kind of error that an answer names, where it is one word: a message may quote the prompt."""
    try:
        kind = json.loads(error.read(2**16))["error"]["type"]
    except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException, RecursionError):
        return ""
    return f" ({kind})" if isinstance(kind, str) and re.fullmatch(r"[A-Za-z_]{1,40}", kind) else ""


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a header that holds seconds or a date; None where it holds neither.

    Example:
        >>> _retry_after("12"), _retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), _retry_after("soon")
        (12.0, 0.0, None)
    """
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    date = date if date.tzinfo is not None else date.replace(tzinfo=dt.timezone.utc)
    return max(0.0, (date - dt.datetime.now(dt.timezone.utc)).total_seconds())


def _completion(endpoint: Endpoint, answer: Any) -> Answer:
    """Text of the one choice of an answer, and whether the model ended it."""
    try:
        choice = answer["choices"][0]
        text, reason, model = choice["text"], choice.get("finish_reason"), answer.get("model")
    except (LookupError, TypeError, AttributeError):
        text = reason = model = None
    if not isinstance(text, str):
        raise EndpointError(f"endpoint {endpoint.host} answers with what is no completion: choices[0].text is missing.")
    if isinstance(model, str) and not _is_same(model, endpoint.model):
        raise EndpointError(f"endpoint {endpoint.host} must serve model '{endpoint.model}', got '{model[:80]}'.")
    return whole_characters(text), reason == "stop"


def _is_same(answered: str, asked: str) -> bool:
    """Servers add a date, a folder or a provider to a name."""
    return answered in asked or asked in answered


def _check_model(endpoint: Endpoint) -> list[str]:
    """Notices, where the endpoint does not say which models it serves."""
    try:
        answer = _call(endpoint, f"{endpoint.url.rstrip('/')}/models", None)
        names = [one["id"] for one in answer["data"]]
    except (_Passing, EndpointError, LookupError, TypeError):
        names = []
    if not names:
        return [f"endpoint {endpoint.host} lists no models: that '{endpoint.model}' wrote this rests on its word."]
    if endpoint.model not in names:
        served = ", ".join(f"'{str(name)[:80]}'" for name in names[:MAX_NAMED])
        raise EndpointError(f"endpoint {endpoint.host} must serve model '{endpoint.model}', got {served}.")
    return []
