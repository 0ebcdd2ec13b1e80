"""edge: the layers around the application, outermost first: access log, CORS, keys, bodies."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo.server.http.access_log import HEADER, AccessLog
from octavo.server.http.bodies import Bodies
from octavo.server.http.errors import Error, error_body
from octavo.server.http.guard import ApiKeys, load_keys
from octavo.server.options import ServerConfig
from octavo.server.service import Service

__all__ = ["with_edge"]


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = Error(message=f"{bytes(response.body).decode()}.", type="invalid_request_error", code="cors")
        return Response(error_body(error), 403, media_type="application/json")


def with_edge(app: ASGIApp, config: ServerConfig, service: Service) -> ASGIApp:
    """Raises ConfigError for keys that can't be read."""
    app = Bodies(app, config.max_body_bytes, service)
    if keys := load_keys(config):
        app = ApiKeys(app, keys)
    if config.allowed_origins:
        app = _Cors(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER.decode()],
        )
    return AccessLog(app, config.access_log, service.metrics.count_http)
