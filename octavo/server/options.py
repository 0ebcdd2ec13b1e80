"""ServerConfig: the HTTP server's options, as a user sets them."""

import os
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.options import check_options, option
from octavo.text.reasoning import REASONING_FORMATS
from octavo.text.tool_calls import TOOL_FORMATS

__all__ = ["ServerConfig", "shown_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server's options."""

    host: str = option(
        "127.0.0.1", "Address or name to listen on: 0.0.0.0 for all addresses of IPv4, :: for those of IPv6 too."
    )
    port: int = option(8000, "Port to listen on; 0 picks a free one.", least=0, most=65535)
    served_model_name: tuple[str, ...] = option(
        (), "Names that requests may call the model by; answers bear the first. Default: the --model value."
    )
    chat_template: str | None = option(
        None, "Chat template, a file with one, or the name of one of the model's, instead of its default."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring their own chat template. It is a program, and may run for long."
    )
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls. Default: found from the chat template.", choices=(*TOOL_FORMATS, "none")
    )
    reasoning_parser: str | None = option(
        None,
        "How the model marks its reasoning. Default: found from the chat template.",
        choices=(*REASONING_FORMATS, "none"),
    )
    strict: bool = option(False, "Refuse requests with unknown fields, instead of naming the fields in a header.")
    access_log: str = option(
        "text",
        "How each request is logged: a line of text, a JSON object, or not at all.",
        choices=("text", "json", "off"),
    )
    shutdown_timeout: float = option(30.0, "Seconds that open requests get to finish after SIGTERM.", least=0)
    max_num_queued_reqs: int = option(
        1024, "Requests that may wait for their first token; more are refused with status 429 and Retry-After.", least=1
    )
    request_timeout: float | None = option(
        None, "Seconds after which a request ends with an error; default: never.", least=0.001
    )
    client_timeout: float = option(
        60.0,
        "Seconds that a client may take to send a request, or read nothing of its answer, before it is cut off.",
        least=0.001,
    )
    timeout_keep_alive: int = option(
        75,
        "Seconds that a connection stays open between two requests: longer than a balancer in front keeps it.",
        least=1,
    )
    sse_ping_interval: float = option(
        5.0,
        "Seconds of silence after which a stream gets a comment line, lest proxies cut it off; 0 for none.",
        least=0,
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, one of which a request must bear. @FILE stands for the lines of a file, and OCTAVO_API_KEY in the "
        "environment is read too: a list of processes shows neither.",
    )
    ssl_keyfile: str | None = option(None, "Private key, to serve HTTPS.")
    ssl_certfile: str | None = option(None, "Certificate, followed by those of intermediate authorities.")
    ssl_ca_certs: str | None = option(
        None, "Certificates of authorities. Every client must then show a certificate that one of them signed."
    )
    allowed_origins: tuple[str, ...] = option((), "Origins whose pages browsers let call the server; * for all.")
    max_body_bytes: int = option(16 << 20, "Most bytes of a request's body.", least=1024)
    max_request_choices: int = option(2048, "Most choices of one request: its prompts times n.", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.host.startswith("[") and self.host.endswith("]"):  # as in a URL
            object.__setattr__(self, "host", self.host[1:-1])
        if not self.host.strip():
            raise ConfigError("--host must be an address or a name, got nothing.")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name was given an empty name.")
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("HTTPS needs --ssl-certfile beside the other --ssl options.")

    def names(self, model: str) -> tuple[str, ...]:
        """What requests may call the model: the --model value, if no name is set."""
        return self.served_model_name or (shown_path(model),)


def shown_path(path: str) -> str:
    """A path in characters that can be sent: its bytes are UTF-8 mostly, whatever the locale takes them for."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
