"""llama.cpp as a peer: LLAMA_CPP=SOURCE python peer_llama_cpp.py FOLDER DTYPE [DRAFTS]. SOURCE is the source of
llama.cpp (vendor/llama.cpp in that of llama-cpp-python), whose own code writes the weights as GGUF; it needs torch
and transformers. Without DRAFTS llama-cpp-python decodes. With them it is SOURCE/build/bin/llama-server, from

    cmake -B build && cmake --build build --target llama-server"""

import sys
from pathlib import Path


def main() -> None:
    """Serve in the one way or the other; each needs packages that the other does not."""
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        from llama_server import serve_drafting

        serve_drafting(folder, dtype, int(sys.argv[3]))
    else:
        from llama_decode import serve_decoding

        serve_decoding(folder, dtype)


if __name__ == "__main__":
    main()
