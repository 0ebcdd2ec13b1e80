"""A server over the scripted engine: `python -m tests.server.scripted_server FOLDER [SHUTDOWN_TIMEOUT [PORT]]`.

Prints at its end which of the modules that the API process must not load are loaded.
"""

import json
import sys

from octavo.config import EngineConfig, ServerConfig
from octavo.server.launch import serve

FORBIDDEN = ("torch", "transformers", "numpy.testing")
ENGINE_COMMAND = (sys.executable, "-m", "tests.server.scripted_engine")


def main(folder: str, shutdown_timeout: str = "30", port: str = "0") -> int:
    status = serve(
        EngineConfig(model=folder, tokenizer=folder, max_model_len=512),
        ServerConfig(port=int(port), served_model_name="scripted", shutdown_timeout=float(shutdown_timeout)),
        ENGINE_COMMAND,
    )
    print("loaded", json.dumps([name for name in FORBIDDEN if name in sys.modules]))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
