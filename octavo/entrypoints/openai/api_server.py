"""The module path that vLLM's users type: `octavo serve` under another name."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
