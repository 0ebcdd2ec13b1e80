"""A server over the scripted engine: `python -m tests.server.scripted_server FOLDER [options of octavo serve]`.

Prints at its end which of the modules that the API process must not load are loaded, and from SIGUSR1 on each file,
process and connection that it opens.
"""

import json
import signal
import sys

from octavo.cli import serve as command
from octavo.cli.arguments import Parser, parse
from octavo.server.launch import serve

FORBIDDEN = ("torch", "transformers", "numpy.testing")
ENGINE_COMMAND = (sys.executable, "-m", "tests.server.scripted_engine")
DEFAULTS = ("--port", "0", "--served-model-name", "scripted", "--max-model-len", "512", "--max-num-seqs", "16")


WATCHED = ("open", "os.", "shutil.", "socket.connect", "socket.getaddrinfo", "subprocess.")


def watch(*_: object) -> None:
    """Print what happens from now on."""
    sys.addaudithook(lambda event, args: event.startswith(WATCHED) and print("audit", event, args[:1], flush=True))


def main(folder: str, *options: str) -> int:
    signal.signal(signal.SIGUSR1, watch)
    parser = Parser()
    command.configure(parser)
    args = parse(parser, [folder, "--tokenizer", folder, *DEFAULTS, *options])
    status = serve(*command.configs(args), ENGINE_COMMAND)
    print("loaded", json.dumps([name for name in FORBIDDEN if name in sys.modules]))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
