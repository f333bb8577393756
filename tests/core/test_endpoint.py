"""A completions endpoint that answers, fails, dawdles or lies: what comes back is whole, marked as a part, or an error."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from memguard.audit import endpoint as module
from memguard.audit.decoding import DecodingSettings, Prompt
from memguard.audit.endpoint import Endpoint, api_key_from, generate_at_endpoint
from memguard.cli import exit_code_of
from memguard.errors import EndpointError, InputError

GREEDY = DecodingSettings(num_samples=0, max_new_tokens=12)
KEY = "sk-do-not-tell"
Answer = tuple[int, dict[str, str], bytes]


class Server:
    """A small server; `script` gives the answer to the n-th request for a completion."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[str] | None = ["small"]
        self.script: Callable[[int, dict[str, Any]], Answer] = lambda _, body: said(f"after {len(body['prompt'])}")
        self.released = threading.Event()
        self._lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if outer.models is None:
                    self._send((404, {}, b"{}"))
                else:
                    self._send((200, {}, json.dumps({"data": [{"id": one} for one in outer.models]}).encode()))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.asked)
                    outer.asked.append(body)
                    outer.headers.append(dict(self.headers))
                self._send(outer.script(number, body))

            def _send(self, answer: Answer) -> None:
                status, headers, text = answer
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(text))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(text)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def said(text: str, *, reason: str = "length", model: str = "small") -> Answer:
    return 200, {}, json.dumps({"model": model, "choices": [{"text": text, "finish_reason": reason}]}).encode()


def failed(status: int, headers: dict[str, str] | None = None, body: bytes = b"{}") -> Answer:
    return status, headers or {}, body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.0)
    one = Server()
    yield one
    one.close()


def prompts_of(tokenizer: Any, number: int = 3) -> list[Prompt]:
    texts = ["the first words ", "another", "one more of them here", *(f"and number {place}" for place in range(3, number))]
    return [
        Prompt("generic", f"line {place}", tuple(tokenizer(text)["input_ids"]), text)
        for place, text in enumerate(texts[:number], start=1)
    ]


def test_continuations_come_back_in_order_with_their_ids(server: Server, tokenizer: Any) -> None:
    prompts = prompts_of(tokenizer)
    server.script = lambda _, body: said(f"after {len(body['prompt'])} r\u00f8d\ufffd", reason="stop")
    found = generate_at_endpoint(Endpoint(server.url, "small", api_key=KEY), prompts, tokenizer, GREEDY)
    assert [item.text for item in found.items] == [f"after {len(prompt.ids)} r\u00f8d" for prompt in prompts]
    assert [item.ids for item in found.items] == [tuple(tokenizer(item.text)["input_ids"]) for item in found.items]
    assert all(item.is_ended for item in found.items)
    assert (found.stopped, found.notices, found.num_wanted) == (None, (), 3)
    assert {tuple(body["prompt"]) for body in server.asked} == {prompt.ids for prompt in prompts}
    for body, headers in zip(server.asked, server.headers, strict=True):
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("small", 12, 0.0, 1.0)
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert "top_k" not in body


def test_every_sample_has_a_seed_of_its_own_that_stays(server: Server, tokenizer: Any) -> None:
    decoding = DecodingSettings(num_samples=4, top_k=5)
    for _ in range(2):
        found = generate_at_endpoint(Endpoint(server.url, "small"), prompts_of(tokenizer), tokenizer, decoding, seed=3)
        assert [(item.prompt, item.sample) for item in found.items] == [(p, s) for p in range(3) for s in range(4)]
    seeds = [body["seed"] for body in server.asked]
    assert len(set(seeds[:12])) == 12
    assert sorted(seeds[:12]) == sorted(seeds[12:])
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in server.asked} == {(0.7, 0.95, 5)}


def test_prompts_sent_as_text_lose_their_last_blank_and_those_without_text_are_left_out(server: Server, tokenizer: Any) -> None:
    prompts = [Prompt("unconditional", "1", (0,)), *prompts_of(tokenizer, 2)]
    found = generate_at_endpoint(Endpoint(server.url, "small", send="text"), prompts, tokenizer, GREEDY)
    assert {body["prompt"] for body in server.asked} == {"the first words", "another"}
    assert [item.prompt for item in found.items] == [1, 2]
    assert found.num_wanted == 2
    assert found.notices == ("1 prompts cannot be sent as text and were left out.",)


@pytest.mark.parametrize(
    "passing",
    [
        failed(500, body=b"a secret prompt"),
        failed(429, {"Retry-After": "0"}),
        failed(503, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        (200, {}, b'{"model": "small", "choices": [{"te'),
        (200, {"Content-Length": "4000"}, b'{"model": "small"'),
        (200, {}, b""),
    ],
    ids=["500", "429", "503 with a date", "half JSON", "broken off", "empty"],
)
def test_what_passes_is_asked_again(server: Server, tokenizer: Any, passing: Answer) -> None:
    server.script = lambda number, _: passing if number < 2 else said("at last")
    endpoint = Endpoint(server.url, "small", num_parallel=1, timeout_s=5)
    found = generate_at_endpoint(endpoint, prompts_of(tokenizer), tokenizer, GREEDY)
    assert [item.text for item in found.items] == ["at last"] * 3
    assert len(server.asked) == 5


def test_the_wait_an_endpoint_asks_for_is_kept_within_bounds(
    server: Server, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    monkeypatch.setattr(module, "FIRST_WAIT", 1.0)
    ask, body = Endpoint(server.url, "small", max_attempts=4), {"prompt": [1]}
    server.script = lambda number, _: failed(429, {"Retry-After": "7"} if number == 0 else {}) if number < 3 else said("x")
    assert module._ask(ask, body, Event()) == ("x", False)
    assert waits == [7.0, 2.0, 4.0]
    server.script = lambda *_: failed(429, {"Retry-After": "3600"})
    with pytest.raises(EndpointError, match=r"answers with status 429 and asks to wait 3600 seconds, at attempt 1 of 4\."):
        module._ask(ask, body, Event())
    assert len(waits) == 3


def test_an_endpoint_that_dies_half_way_leaves_a_marked_part(server: Server, tokenizer: Any) -> None:
    server.script = lambda number, _: said("came back") if number < 4 else failed(500)
    endpoint = Endpoint(server.url, "small", num_parallel=1, max_attempts=2)
    found = generate_at_endpoint(endpoint, prompts_of(tokenizer, 9), tokenizer, GREEDY)
    assert [item.prompt for item in found.items] == [0, 1, 2, 3]
    assert found.num_wanted == 9
    assert found.stopped == (
        f"endpoint {endpoint.host} answers with status 500, at attempt 2 of 2. 4 of 9 continuations had come back."
    )
    assert len(server.asked) == 6


def test_an_endpoint_that_never_answers_ends_within_its_time(server: Server, tokenizer: Any) -> None:
    def dawdle(*_: Any) -> Answer:
        server.released.wait(30)
        return said("too late")

    server.script = dawdle
    endpoint = Endpoint(server.url, "small", timeout_s=0.05, max_attempts=2)
    with pytest.raises(EndpointError, match=r"gave no answer within 0\.05 seconds, at attempt 2 of 2") as caught:
        generate_at_endpoint(endpoint, prompts_of(tokenizer), tokenizer, GREEDY)
    assert exit_code_of(caught.value) == 4


def test_an_answer_that_comes_in_drops_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drops:
        length = None

        def read1(self, _: int) -> bytes:
            return b"x"

    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(TimeoutError):
        module._read(Drops(), Endpoint("http://localhost/v1", "small", timeout_s=5))
    monkeypatch.setattr(module, "MAX_ANSWER", 3)
    monkeypatch.setattr(time, "monotonic", time.perf_counter)
    with pytest.raises(EndpointError, match="answers with more than 0 MiB"):
        module._read(Drops(), Endpoint("http://localhost/v1", "small"))


def test_an_endpoint_that_is_down_is_said_to_be(server: Server, tokenizer: Any) -> None:
    url = server.url
    server.server.server_close()
    with pytest.raises(EndpointError, match="cannot be reached, at attempt 4 of 4") as caught:
        generate_at_endpoint(Endpoint(url, "small", api_key=KEY), prompts_of(tokenizer), tokenizer, GREEDY)
    assert KEY not in str(caught.value)


def test_a_proxy_is_not_asked_for_what_runs_beside_it(server: Server, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert len(generate_at_endpoint(Endpoint(server.url, "small"), prompts_of(tokenizer), tokenizer, GREEDY).items) == 3


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (failed(401), r"answers with status 401\. It refuses the key\."),
        (failed(404), r"answers with status 404\. It knows no model 'small', or has no completions at this address\."),
        (
            failed(400, body=b'{"error": {"type": "bad_request", "message": "a secret"}}'),
            r"status 400 \(bad_request\)\. It takes no",
        ),
        (failed(400, body=b'{"error": {"type": "4000 1234"}}'), r"status 400\. It takes no such request"),
        (failed(302, {"Location": "http://127.0.0.1:1/v1"}), r"status 302\. Redirects are not followed"),
        ((200, {}, b'{"choices": []}'), "answers with what is no completion"),
        ((200, {}, b'{"choices": [{"text": null}]}'), "answers with what is no completion"),
        ((200, {}, b"[]"), "answers with what is no completion"),
        (said("x", model="another"), "must serve model 'small', got 'another'"),
    ],
)
def test_what_does_not_pass_ends_at_once(server: Server, tokenizer: Any, answer: Answer, sentence: str) -> None:
    server.script = lambda *_: answer
    endpoint = Endpoint(server.url, "small", api_key=KEY, num_parallel=1)
    with pytest.raises(EndpointError, match=sentence) as caught:
        generate_at_endpoint(endpoint, prompts_of(tokenizer), tokenizer, GREEDY)
    assert len(server.asked) == 1
    for hidden in (KEY, "secret", "4000", "first words"):
        assert hidden not in str(caught.value)


def test_a_key_is_asked_for_where_none_was_given(server: Server, tokenizer: Any) -> None:
    server.script = lambda *_: failed(403)
    with pytest.raises(EndpointError, match="It wants a key: name the variable that holds it"):
        generate_at_endpoint(Endpoint(server.url, "small"), prompts_of(tokenizer), tokenizer, GREEDY)


def test_another_model_is_refused_before_anything_is_asked(server: Server, tokenizer: Any) -> None:
    server.models = ["large", "larger"]
    with pytest.raises(EndpointError, match="must serve model 'small', got 'large', 'larger'"):
        generate_at_endpoint(Endpoint(server.url, "small"), prompts_of(tokenizer), tokenizer, GREEDY)
    assert not server.asked


def test_an_endpoint_that_lists_no_models_is_taken_at_its_word_and_a_longer_name_is_the_same(
    server: Server, tokenizer: Any
) -> None:
    server.models = None
    server.script = lambda *_: said("x", model="small-0914")
    found = generate_at_endpoint(Endpoint(server.url, "small"), prompts_of(tokenizer), tokenizer, GREEDY)
    (notice,) = found.notices
    assert "lists no models: that 'small' wrote this rests on its word" in notice
    assert len(found.items) == 3


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/v1",
        "ftp://host/v1",
        "http://",
        "http://host/v1?key=1",
        "http://host:99999/v1",
        "http://ho st/v1",
        "http://[/v1",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="the endpoint must be an address such as http://localhost:8000/v1"):
        Endpoint(url, "small")


def test_a_password_in_the_address_and_a_number_that_allows_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="must hold no user or password") as caught:
        Endpoint(f"http://me:{KEY}@host/v1", "small")
    assert KEY not in str(caught.value)
    for name in ("timeout_s", "max_attempts", "num_parallel"):
        with pytest.raises(InputError, match=f"{name} must be above 0, got 0"):
            Endpoint("http://host/v1", "small", **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the key of the endpoint must be printable letters without blanks"):
        Endpoint("http://host/v1", "small", api_key="a\nb")


def test_the_key_comes_from_the_named_variable_and_is_told_to_nobody() -> None:
    assert api_key_from({"MY_KEY": f"{KEY}\n"}, "MY_KEY") == KEY
    assert api_key_from({"MY_KEY": KEY}, None) is None
    for environment in ({}, {"MY_KEY": "  "}):
        with pytest.raises(InputError, match="variable 'MY_KEY' must hold the key of the endpoint, got nothing"):
            api_key_from(environment, "MY_KEY")
    with pytest.raises(InputError, match="variable 'MY_KEY' must hold a key of printable letters without blanks") as caught:
        api_key_from({"MY_KEY": f"{KEY} {KEY}"}, "MY_KEY")
    assert KEY not in str(caught.value)
    assert KEY not in repr(Endpoint("http://host/v1", "small", api_key=KEY))
