"""The HTTP application: routes, and what they share. Started by `octavo.server.launch.serve`.

The command line calls `octavo.server.launch.serve(engine_config, server_config) -> int` (the process's exit status; it
never raises OctavoError but prints one line). That module imports neither torch, FastAPI nor this one at its top, so that the
engine process is running before they load.
"""
