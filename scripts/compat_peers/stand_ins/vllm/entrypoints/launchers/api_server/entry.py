"""python -m ...: the server as a process, as vLLM's tests start it."""

import os
import sys

from compat_peers import serving

if __name__ == "__main__":
    args = sys.argv[1:]
    at = args.index("--model")
    command = serving.serve_command(args[at + 1], args[:at] + args[at + 2 :])
    os.execv(command[0], command)
