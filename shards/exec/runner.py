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
from shards.exec.drawing import Drawing, Sample
from shards.exec.network import CapturingNetwork, DrawingNetwork, Network
from shards.exec.piece import Piece
from shards.exec.sampling import Sampler, sample
from shards.exec.sequence import Sequence
from shards.exec.slots import Slot, Slots
from shards.kv.keys import BLOCK_TOKENS

_NOWHERE: Mapping[int, int] = {}
_NO_SLOTS: Mapping[int, Slot] = {}


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan between its start and its tokens: `ticket` if a device draws them, else the `logits` to draw from.

    `samplers` are those of the rows that are drawn on the host, in order, each in its state at every needed logit;
    `drawings` are those of rows that are drawn on a device, and `masked` the samplers of those with a mask. The next
    step can build on tokens that a device draws before they land.
    """

    pieces: tuple[Piece, ...]
    samplers: tuple[Sampler, ...] = ()
    logits: Tensor | None = None
    ticket: Hashable = None
    drawings: Listed[Drawing] = ()
    masked: Listed[Sampler] = ()

    @property
    def may_stay(self) -> bool:
        """Whether the next plan may be submitted before this one is collected: not if it depends on drafts."""
        return self.ticket is not None and not any(piece.draft for piece in self.pieces)


class Runner:
    """Runs plans on `network`. Between steps it remembers where the device has put the tokens that it drew last.

    A network that can draw draws every token. A `deterministic` runner computes each sequence on its own, in pieces
    with sizes that depend only on their position: then the same operations on the same shapes give the same bits,
    whatever else is in the step. At most `rows` sequences draw in one step.
    """

    def __init__(self, network: Network, *, deterministic: bool = False, rows: int = 64) -> None:
        self._network, self._deterministic = network, deterministic
        self._device = network if isinstance(network, DrawingNetwork) else None
        self._capturing = network if isinstance(network, CapturingNetwork) else None
        self._places: Mapping[int, int] = _NOWHERE
        self._slots = Slots(rows)

    def submit(self, pieces: tuple[Piece, ...], sampler_of: Callable[[Sequence], Sampler]) -> Flight:
        """Start computing `pieces`. Their tables must have room, and all flights but the last must be collected.

        Changes only the samplers, which record the prompt before the first draw. Call `release` once the flight before
        this one is collected.
        """
        drawing = [piece for piece in pieces if piece.draws]
        samplers = tuple(sampler_of(piece.sequence) for piece in drawing)
        for piece, sampler in zip(drawing, samplers, strict=True):
            if not piece.sequence.has_drawn and (self._device is None or sampler.guide is not None):
                request = piece.sequence.request
                prompt = request.token_ids(0, request.submission.prompt_tokens)
                (sampler.begin if self._device is None else sampler.resume)(prompt)
        if self._device is None:
            return Flight(pieces, _ahead(drawing, samplers), logits=self._compute(pieces))
        drawings = self._drawings(drawing, samplers)
        masked = [sampler for sampler in samplers if sampler.guide is not None]
        if self._deterministic:
            return Flight(pieces, logits=self._compute(pieces), drawings=drawings, masked=masked)
        ticket = self._device.submit(lay_out(pieces, places=self._places, drafts_apart=True), drawings)
        self._places = {piece.sequence.arrival: place for place, piece in enumerate(drawing)}
        return Flight(pieces, ticket=ticket, drawings=drawings, masked=masked)

    @property
    def uncaptured_steps(self) -> int:
        """The network's steps that ran without a captured one since a capture failed."""
        return 0 if self._capturing is None else self._capturing.uncaptured_steps

    def release(self, flight: Flight) -> None:
        """Let `flight` draw: the tokens before its own are recorded, so that its grammars know what may come next."""
        if self._device is not None and flight.ticket is not None and flight.masked:
            self._device.mask(flight.ticket, [sampler.mask() for sampler in flight.masked])

    def collect(self, flight: Flight) -> list[Sample | None]:
        """Wait for `flight`: a token for each of its logits, in order. Flights are collected in their order.

        The token behind a drafted one is drawn as if the draft were right. None where the network gave NaN or infinity.
        """
        if self._device is not None and flight.ticket is not None:
            return self._device.collect(flight.ticket)
        logits, samplers = flight.logits, flight.samplers
        wanted = (len(samplers) + len(flight.drawings), self._network.vocabulary)
        if logits is None or logits.shape != wanted:
            given = None if logits is None else tuple(logits.shape)
            raise ValueError(f"the network gave logits of shape {given} for {wanted[0]} rows")
        if self._device is not None:
            return self._device.draw(logits, flight.drawings, [sampler.mask() for sampler in flight.masked])
        # each row by itself if deterministic, else all at once
        parts = [[row] for row in range(len(samplers))] if self._deterministic else [range(len(samplers))]
        drawn = [sample(logits[part[0] : part[-1] + 1], [samplers[row] for row in part]) for part in parts if part]
        return [each for part in drawn for each in part]

    def _drawings(self, pieces: Listed[Piece], samplers: Listed[Sampler]) -> list[Drawing]:
        """The drawings of all logits that `pieces` need."""
        keeping = [
            piece.sequence.arrival for piece, sampler in zip(pieces, samplers, strict=True) if sampler.keeps_state
        ]
        slots = self._slots.take(keeping) if keeping else _NO_SLOTS
        drawings: list[Drawing] = []
        for piece, sampler in zip(pieces, samplers, strict=True):
            slot = slots.get(piece.sequence.arrival) if sampler.keeps_state else None
            for tokens in range(piece.logits):
                unseen = piece.sequence.unseen + tokens
                if slot is None:
                    drawings.append(sampler.drawing(unseen))
                    continue
                begins = None
                if slot.is_new and not tokens:
                    assert not unseen, "a slot begins with a token that the host does not know"
                    begins = sampler.beginning(np.asarray(piece.sequence.token_ids(0, piece.sequence.seen_tokens)))
                drawings.append(sampler.drawing(unseen, sampler.adjustment(slot.place, unseen, begins)))
        return drawings

    def _compute(self, pieces: Listed[Piece]) -> Tensor:
        if not self._deterministic:
            return self._network.forward(lay_out(pieces, places=self._places, drafts_apart=self._device is not None))
        logits = [self._network.forward(lay_out([part], is_exact=True)) for piece in pieces for part in piece.cut()]
        return torch.cat([row for row in logits if len(row)]) if any(map(len, logits)) else logits[-1]


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
    ids, positions, slots = placed(rows, token_ids)
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


def placed(rows: Listed[Row], token_ids: Listed[Tokens]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids, positions and slots of all tokens of `rows`, which have these `token_ids`, row by row."""
    spans = [np.arange(row.context_tokens - row.tokens, row.context_tokens) for row in rows]
    places = [_slots(row, span) for row, span in zip(rows, spans, strict=True)]
    ids = torch.from_numpy(np.concatenate(token_ids).astype(np.int64))
    return ids, torch.from_numpy(np.concatenate(spans)), torch.from_numpy(np.concatenate(places))


def _slots(row: Row, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    first = int(positions[0]) // BLOCK_TOKENS
    blocks = np.array(row.blocks[first:], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS - first] * BLOCK_TOKENS + positions % BLOCK_TOKENS
