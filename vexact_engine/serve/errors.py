"""What goes wrong, as clients of OpenAI's API are told: a status, and {"error": {message, type, param, code}}."""

import logging

from ..errors import EngineAsleep, EngineClosed, EngineForked, ReplicaDied, StepFailed, WeightsTorn

log = logging.getLogger("vexact_engine.serve")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class APIError(Exception):
    """An answer that is an error.

    param   the field of the request that it is about
    code    a word for programs
    retry   seconds after which it may be worth another try
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    def body(self) -> dict:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry is None else {"retry-after": str(self.retry)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: BaseException, request_id: str = "") -> APIError:
    """What a client is told of an exception. Nothing of the inside: that goes to the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineClosed | EngineForked):
        return APIError(503, "the engine is closed", code="engine_closed")
    if isinstance(error, ReplicaDied):
        log.error("%s: %s", request_id or "a request", error)
        return APIError(503, "no replica could finish this request; the server's log says more", code="replica_died")
    if isinstance(error, TimeoutError):  # a replica stands still
        log.error("%s: %s", request_id or "a request", error)
        return APIError(504, "the engine does not answer; the server's log says more", code="no_answer", retry=5)
    if isinstance(error, WeightsTorn | EngineAsleep):
        return APIError(503, str(error), code="engine_not_ready", retry=5)
    log.error("%s: failed", request_id or "a request", exc_info=error)
    if isinstance(error, StepFailed):
        return APIError(500, "the computation of a step failed; the server's log says more", code="step_failed")
    return APIError(500, "the server failed; its log says more", code="internal_error")
