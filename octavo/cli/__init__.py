"""The octavo command. Its modules import torch, the server and the engine only when a command that needs them runs."""
