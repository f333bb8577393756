"""What went wrong between us and a registry, in a few words that are safe to print.

A library's own message is never repeated: it may hold an address with credentials, a header or a path.
"""

from __future__ import annotations

from collections.abc import Iterator

WORDS = {
    401: "the login was refused",
    403: "this login is not allowed to do that",
    404: "it is not there",
    409: "it was changed meanwhile",
    412: "it was changed meanwhile",
}
CODES = {
    "UNAUTHENTICATED": 401,
    "CUSTOMER_UNAUTHORIZED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_DOES_NOT_EXIST": 404,
    "NOT_FOUND": 404,
    "RESOURCE_CONFLICT": 409,
}
UNREADABLE = ("JSONDecodeError", "ParseError", "UnicodeDecodeError", "ValidationError", "WandbApiFailedError")
CUT_SHORT = ("IncompleteRead", "ChunkedEncodingError", "RemoteProtocolError", "ContentDecodingError")


def describe_failure(error: BaseException) -> str:
    """Why an exchange with a registry failed, in a few words, from the kinds and codes of an exception and its causes.

    Example:
        >>> describe_failure(TimeoutError("http://user:secret@host"))
        'it did not answer in time'
        >>> describe_failure(RuntimeError("anything"))
        'an unexpected RuntimeError'
    """
    causes = list(_causes(error))
    kinds = [type(cause).__name__ for cause in causes]  # not their bases: a refused connection is a kind of timeout to urllib3
    status = next((status for cause in causes if (status := status_of(cause)) is not None), None)
    code = next((code for cause in causes if isinstance(code := getattr(cause, "error_code", None), str)), None)
    if status in WORDS:
        return f"{WORDS[status]} ({status if code not in CODES else code})"
    if status is not None:
        return f"it answered with status {status}"
    if any("Timeout" in kind for kind in kinds):
        return "it did not answer in time"
    if any(kind in CUT_SHORT for kind in kinds):
        return "its answer broke off"
    if any(kind in UNREADABLE for kind in kinds):
        return "its answer cannot be read"
    if any(kind.startswith(("Connect", "NewConnection")) for kind in kinds):
        return "it cannot be reached"
    return f"no usable answer ({code})" if code is not None else f"an unexpected {type(error).__name__}"


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an exception of requests, httpx, W&B or MLflow, where it tells one."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(response, "http_status", None)
    if isinstance(status, int) and status > 0:
        return status
    return CODES.get(str(getattr(error, "error_code", "")))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from, outermost first."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
