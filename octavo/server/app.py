"""The HTTP application, put together from its routes. `octavo.server.launch.serve` starts it."""

from fastapi import FastAPI

from octavo import __version__
from octavo.server.http import health
from octavo.server.http.errors import install_error_handlers
from octavo.server.http.openapi import install_openapi
from octavo.server.routes import chat, completions, embeddings, invocations, models, operations, tokens
from octavo.server.service import Service

__all__ = ["create_app"]

ROUTES = (chat, completions, embeddings, invocations, models, tokens, operations, health)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="octavo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    for routes in ROUTES:
        app.include_router(routes.router)
    install_error_handlers(app)
    install_openapi(app)
    return app
