"""Runs a plan: lays out the batch, runs the network, and draws tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.exec.network import CapturingNetwork, DrawingNetwork, Network
from shards.exec.piece import Piece
from shards.exec.sampling import Sample, Sampler, sample
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS

_NOWHERE: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan between its start and its tokens: `ticket` if a device draws them, else the `logits` to draw from.

    `samplers` are those of the drawing pieces, in order, each in its state at every needed logit. The next step can
    build on tokens that a device draws before they land.
    """

    pieces: tuple[Piece, ...]
    samplers: tuple[Sampler, ...]
    logits: Tensor | None = None
    ticket: Hashable = None

    @property
    def may_stay(self) -> bool:
        """Whether the next plan may be submitted before this one is collected: not if it depends on drafts."""
        return self.ticket is not None and not any(piece.draft for piece in self.pieces)


class Runner:
    """Runs plans on `network`. Between steps it remembers where the device has put the tokens that it drew last.

    A network that can draw does so for every sampler without a table over the vocabulary (`Sampler.needs_host`); the
    place where one answer is drawn never changes. If one row needs the host, the whole step is drawn before the next.
    A `deterministic` runner computes each sequence on its own, in pieces with sizes that depend only on their position:
    then the same operations on the same shapes give the same bits, whatever else is in the step.
    """

    def __init__(self, network: Network, *, deterministic: bool = False) -> None:
        self._network, self._deterministic = network, deterministic
        self._device = network if isinstance(network, DrawingNetwork) else None
        self._capturing = network if isinstance(network, CapturingNetwork) else None
        self._places: Mapping[int, int] = _NOWHERE

    def submit(self, pieces: tuple[Piece, ...], sampler_of: Callable[[Sequence], Sampler]) -> Flight:
        """Start computing `pieces`. Their tables must have room, and all flights but the last must be collected.

        Changes only the samplers, which record the prompt before the first draw.
        """
        drawing = [piece for piece in pieces if piece.draws]
        samplers = tuple(sampler_of(piece.sequence) for piece in drawing)
        if self._device is None or self._deterministic or any(sampler.needs_host for sampler in samplers):
            for piece, sampler in zip(drawing, samplers, strict=True):
                if not piece.sequence.output:
                    request = piece.sequence.request
                    sampler.begin(request.token_ids(0, request.submission.prompt_tokens))
            return Flight(pieces, _ahead(drawing, samplers), logits=self._compute(pieces))
        drawings = [
            sampler.drawing(piece.sequence.unseen + tokens)
            for piece, sampler in zip(drawing, samplers, strict=True)
            for tokens in range(piece.logits)
        ]
        ticket = self._device.submit(lay_out(pieces, places=self._places, drafts_apart=True), drawings)
        self._places = {piece.sequence.arrival: place for place, piece in enumerate(drawing)}
        return Flight(pieces, samplers, ticket=ticket)

    @property
    def uncaptured_steps(self) -> int:
        """The network's steps that ran without a captured one since a capture failed."""
        return 0 if self._capturing is None else self._capturing.uncaptured_steps

    def collect(self, flight: Flight) -> list[Sample | None]:
        """Wait for `flight`: a token for each of its logits, in order. Flights are collected in their order.

        The token behind a drafted one is drawn as if the draft were right. None where the network gave NaN or infinity.
        """
        if self._device is not None and flight.ticket is not None:
            return [_sample_of(token) for token in self._device.collect(flight.ticket)]
        logits, samplers = flight.logits, flight.samplers
        wanted = (len(samplers), self._network.vocabulary)
        if logits is None or logits.shape != wanted:
            given = None if logits is None else tuple(logits.shape)
            raise ValueError(f"the network gave logits of shape {given} for {len(samplers)} rows")
        return self._draw(logits, samplers)

    def _compute(self, pieces: Listed[Piece]) -> Tensor:
        if not self._deterministic:
            return self._network.forward(lay_out(pieces, places=self._places, drafts_apart=self._device is not None))
        logits = [self._network.forward(lay_out([part], is_exact=True)) for piece in pieces for part in piece.cut()]
        return torch.cat([row for row in logits if len(row)]) if any(map(len, logits)) else logits[-1]

    def _draw(self, logits: Tensor, samplers: Listed[Sampler]) -> list[Sample | None]:
        """A token for each row, drawn on the host or on the device as its sampler requires."""
        drawn: dict[int, Sample | None] = {}
        on_host = [row for row, sampler in enumerate(samplers) if self._device is None or sampler.needs_host]
        on_device = [row for row in range(len(samplers)) if row not in set(on_host)]
        if self._device is not None and on_device:
            tokens = self._device.draw(logits[on_device], [samplers[row].drawing(0) for row in on_device])
            drawn.update(zip(on_device, map(_sample_of, tokens), strict=True))
        # each row by itself if deterministic, else all at once
        for rows in filter(None, [[row] for row in on_host] if self._deterministic else [on_host]):
            chosen = logits if len(rows) == len(samplers) else logits[rows]
            drawn.update(zip(rows, sample(chosen, [samplers[row] for row in rows]), strict=True))
        return [drawn[row] for row in range(len(samplers))]


def _sample_of(token: int | None) -> Sample | None:
    return None if token is None else Sample(token)


def _ahead(pieces: Listed[Piece], samplers: tuple[Sampler, ...]) -> tuple[Sampler, ...]:
    """The samplers of all logits that `pieces` need."""
    if not any(piece.draft for piece in pieces):
        return samplers
    return tuple(
        sampler.ahead(tokens) if tokens else sampler
        for piece, sampler in zip(pieces, samplers, strict=True)
        for tokens in range(piece.logits)
    )


def lay_out(
    pieces: Listed[Piece],
    *,
    places: Mapping[int, int] = _NOWHERE,
    is_exact: bool = False,
    drafts_apart: bool = False,
) -> Batch:
    """The batch that computes `pieces`, in their order. `places` are those of the tokens that only the device knows.

    With `drafts_apart` the certain token and each drafted one are rows of their own: a GPU has graphs for such rows,
    and each finds the keys of all tokens before it, because they are written first.
    """
    windows = pieces[0].sequence.table.pool.windows
    # a copy: pages change while a device still computes the batch
    pages = None if windows is None else torch.from_numpy(windows.of_blocks.copy())
    if all(piece.stop == piece.start + 1 and not piece.draft for piece in pieces):
        return _lay_out_single(pieces, places, is_exact=is_exact, pages=pages)
    token_ids: list[Tokens] = []
    rows: list[Row] = []
    logit_rows: list[int] = []
    ahead: list[tuple[int, int]] = []
    start = 0
    for piece in pieces:
        known, blocks, adapter = _token_ids(piece), piece.blocks, piece.sequence.request.adapter
        if drafts_apart and piece.draft:
            token_ids += [[token_id] for token_id in known]
            rows += [Row(start + at, 1, piece.start + at + 1, blocks, adapter) for at in range(piece.tokens)]
        else:
            token_ids.append(known)
            rows.append(Row(start, piece.tokens, piece.stop, blocks, adapter))
        if piece.is_unseen:
            ahead.append((start, places[piece.sequence.arrival]))
        start += piece.tokens
        logit_rows += range(start - piece.logits, start)
    ids, positions, slots = _several(rows, token_ids)
    wanted = torch.tensor(logit_rows, dtype=torch.int64)
    return Batch(ids, positions, slots, tuple(rows), wanted, is_exact, tuple(ahead), pages)


Tokens = npt.NDArray[np.uint32] | list[int]


def _token_ids(piece: Piece) -> Tokens:
    known = piece.sequence.token_ids(piece.start, piece.known_stop)
    return [*known, *piece.draft] if piece.draft else known


def _lay_out_single(pieces: Listed[Piece], places: Mapping[int, int], *, is_exact: bool, pages: Tensor | None) -> Batch:
    """The batch of pieces with one known token each, as in decoding; lists take a third of numpy's time here."""
    rows: list[Row] = []
    ids: list[int] = []
    slots: list[int] = []
    ahead: list[tuple[int, int]] = []
    for token, piece in enumerate(pieces):
        sequence, position = piece.sequence, piece.start
        blocks = piece.blocks
        rows.append(Row(token, 1, piece.stop, blocks, sequence.request.adapter))
        slots.append(blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS)
        if position < sequence.seen_tokens:
            ids.append(int(sequence.token_ids(position, piece.stop)[0]))
        else:
            ids.append(0)
            ahead.append((token, places[sequence.arrival]))
    wanted = [token for token, piece in enumerate(pieces) if piece.draws]
    columns = (ids, [piece.start for piece in pieces], slots, wanted)
    numbers, positions, at, logit_rows = (torch.tensor(column, dtype=torch.int64) for column in columns)
    return Batch(numbers, positions, at, tuple(rows), logit_rows, is_exact, tuple(ahead), pages)


def _several(rows: list[Row], token_ids: Listed[Tokens]) -> tuple[Tensor, Tensor, Tensor]:
    spans = [np.arange(row.context_tokens - row.tokens, row.context_tokens) for row in rows]
    places = [_slots(row, span) for row, span in zip(rows, spans, strict=True)]
    ids = torch.from_numpy(np.concatenate(token_ids).astype(np.int64))
    return ids, torch.from_numpy(np.concatenate(spans)), torch.from_numpy(np.concatenate(places))


def _slots(row: Row, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    first = int(positions[0]) // BLOCK_TOKENS
    blocks = np.array(row.blocks[first:], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS - first] * BLOCK_TOKENS + positions % BLOCK_TOKENS
