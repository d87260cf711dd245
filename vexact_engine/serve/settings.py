"""What whoever starts a server may choose."""

import ipaddress
import math
from dataclasses import dataclass

from .remote import check_host


@dataclass(frozen=True)
class Settings:
    """Checked when made, as EngineConfig is: TypeError or ValueError names the field.

    host, port         where it listens; port 0: a free one
    model_names        what requests may call the model; the first is the one for those that do not say. None: the last
                       part of its path, and all of it
    api_keys           one of these is asked for, in "Authorization: Bearer KEY". Without one, only a loopback host is
                       accepted, unless allow_no_key says that this is meant, and what controls the engine (/pause,
                       /abort, /sleep, ...) is refused
    max_requests       requests in the server at once; one more gets 429 and when to come again. How many of them are
                       computed at once is the engine's affair: the others wait
    max_samples        prompts times n of one request
    max_prompt_tokens, max_tokens   of one prompt, of one sample; None: what the model and the cache can hold
    max_images         of one prompt; None: what fits
    max_logprobs       likeliest tokens that a request may ask for at each position
    max_body_bytes     of a request; more gets 413
    request_timeout    seconds until an answer must be whole, or it ends with 504
    body_timeout       seconds until a request's body must be there, or it ends with 408
    header_timeout     seconds until a request's header must be there, on a new connection or one that is kept
    max_connections    at once; None: as many as the process may open files, but for 256 of these or for half. One more
                       takes the place of the one that has been silent for longest
    send_timeout       seconds that a client may take nothing of what is ready for it; then it counts as gone
    drain_seconds      how long requests under way may go on after SIGTERM, before they are aborted
    allow_image_hosts  hosts (or host:port) that images and videos of requests may be fetched from; none by default
    allow_origins      web pages that may ask from a browser (CORS); none by default, "*" is any
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] | None = None
    api_keys: tuple[str, ...] = ()
    allow_no_key: bool = False
    max_requests: int = 1024
    max_samples: int = 1024
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_images: int | None = None
    max_logprobs: int = 20
    max_body_bytes: int = 16 << 20
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    header_timeout: float = 20.0
    max_connections: int | None = None
    send_timeout: float = 60.0
    drain_seconds: float = 30.0
    allow_origins: tuple[str, ...] = ()
    allow_image_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, low, optional in (
            ("port", 0, False),
            ("max_requests", 1, False),
            ("max_samples", 1, False),
            ("max_prompt_tokens", 1, True),
            ("max_tokens", 1, True),
            ("max_images", 1, True),
            ("max_logprobs", 0, False),
            ("max_body_bytes", 1, False),
            ("max_connections", 1, True),
        ):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Settings: {name} is {value!r}, expected an integer")
            if name == "port" and not 0 <= value <= 65535:
                raise ValueError(f"Settings: port is {value}, expected a number from 0 (one that is free) to 65535")
            if value < low:
                raise ValueError(f"Settings: {name} is {value}, expected {low} or more")
        for name in ("request_timeout", "body_timeout", "header_timeout", "send_timeout", "drain_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"Settings: {name} is {value!r}, expected seconds")
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "drain_seconds"):
                raise ValueError(f"Settings: {name} is {value}, expected seconds above 0")
        for name in ("api_keys", "model_names", "allow_origins", "allow_image_hosts"):
            values = getattr(self, name)
            if name == "model_names" and values is None:
                continue
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
                raise TypeError(f"Settings: {name} is {'...' if name == 'api_keys' else values!r}, expected strings")
            object.__setattr__(self, name, tuple(values))
        try:
            object.__setattr__(self, "allow_image_hosts", tuple(map(check_host, self.allow_image_hosts)))
        except ValueError as error:
            raise ValueError(f"Settings: allow_image_hosts: {error}") from None
        if self.model_names == ():
            raise ValueError("Settings: model_names is empty, expected a name or None")
        if any(not key.isascii() or key.strip() != key for key in self.api_keys):
            raise ValueError("Settings: api_keys has one with blanks around it or letters beyond ASCII")
        if not (self.api_keys or self.allow_no_key or is_loopback(self.host)):
            raise ValueError(
                f"Settings: host is {self.host!r}, which others can reach, and there is no API key: set one "
                "(VEXACT_API_KEY, or --api-key-file), or say --allow-no-key"
            )


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine gets there."""
    host = host.lower().removesuffix(".")  # names have no case, and may end with the root's dot
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
