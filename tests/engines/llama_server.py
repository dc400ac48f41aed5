"""Run llama.cpp's server from the library that `make engines` installs: llama_server.py MODEL PORT SLOTS.

The same C++ code as the program llama-server, which no wheel carries: its HTTP server, its slots, its metrics.
"""

import signal
import sys

import xllamacpp


def main(model: str, port: int, slots: int) -> None:
    asked = xllamacpp.CommonParams()
    asked.model.path = model
    asked.model_alias = {"pointsman-reader"}
    asked.hostnames = ["127.0.0.1"]
    asked.port = port
    asked.n_parallel = slots
    asked.n_ctx = slots * 2560
    asked.kv_unified = False
    asked.cpuparams.n_threads = 1
    asked.cpuparams_batch.n_threads = 1
    asked.use_jinja = True
    asked.endpoint_metrics = True
    asked.endpoint_slots = True
    asked.warmup = False
    server = xllamacpp.Server(asked)
    print("listening at", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    # blocked before the library's threads are made, so that they inherit it and sigwait gets the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    # the library's own threads would be waited for
    import os

    os._exit(0)
