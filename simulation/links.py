"""The network that carries KV between simulated backends."""

from __future__ import annotations

from dataclasses import dataclass

USUAL_BYTES_S = 10e9
"""Bytes per second of a link without a speed: separate prefill needs one."""


@dataclass(slots=True)
class NetworkLink:
    """One backend's connection to the others, with `bytes_s` in each direction; a transfer takes `fixed_s` in addition.

    Transfers in one direction follow each other: for transfers of one length that is as fast, on average, as if they
    shared the connection, and the last one ends at the same time.
    """

    bytes_s: float
    fixed_s: float
    sends_until_s: float = 0.0
    receives_until_s: float = 0.0

    def receive(self, source: NetworkLink, size: int, now_s: float) -> tuple[float, float]:
        """Begin and end of a transfer of `size` bytes from `source`, asked for at `now_s`."""
        began_s = max(now_s, source.sends_until_s, self.receives_until_s)
        ends_s = began_s + self.fixed_s + size / min(self.bytes_s, source.bytes_s)
        source.sends_until_s = self.receives_until_s = ends_s
        return began_s, ends_s
