"""A process that tries grammars: `python -P -m shards.grammar DESCRIPTOR`, started by `shards.grammar.trials`."""

from __future__ import annotations

import socket
import sys

from shards.grammar.trial import serve
from shards.grammar.trials import MOST_S
from shards.parallel.link import PartLink

if __name__ == "__main__":
    serve(PartLink(socket.socket(fileno=int(sys.argv[1])), waits_s=MOST_S))
