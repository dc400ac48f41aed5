"""Draws on the device: the parameters of each row, and what the device keeps between the draws of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.drawing import Drawing, SlotState
from shards.gpu.layout import Layout
from shards.gpu.transfers import Outbound
from shards.kernels.adjust import (
    BIAS_SHIFT,
    COUNT_SHIFT,
    ENDS,
    IN_PROMPT,
    MOST_BIASES,
    MOST_COUNTED,
    Adjustments,
)
from shards.kernels.draw import Draw
from shards.kernels.sampling import DrawnRows, sample

_MASK_BITS = 32


class Draws:
    """Draws tokens, and stores them in `pool`.

    A slot has 4 bytes for each token of the vocabulary (`shards.kernels.adjust`): 0.5 MiB at 128,256 tokens. Rows with
    a mask read it from a buffer that `send_masks` fills for one step. All addresses stay from `reserve` on.
    """

    def __init__(self, pool: Tensor, vocabulary: int) -> None:
        self._pool, self._vocabulary = pool, vocabulary
        self._outbound = Outbound(pool.device)
        self.reserve(1)

    def __repr__(self) -> str:
        return f"Draws({len(self._entries)} slots)"

    def reserve(self, rows: int) -> None:
        """Allocate slots and masks for `rows` rows."""
        device = self._pool.device
        self._entries = torch.zeros(rows, self._vocabulary, dtype=torch.int32, device=device)
        self._biases = torch.zeros(rows, MOST_BIASES + 1, dtype=torch.float32, device=device)
        self._masks = torch.zeros(rows, -(-self._vocabulary // _MASK_BITS), dtype=torch.int32, device=device)

    def begin(self, drawings: Sequence[Drawing]) -> None:
        """Start filling the slots that begin with one of `drawings`, in one copy.

        Raises ValueError for a slot or a number of masks that was not reserved.
        """
        adjusting = [drawing.adjustment for drawing in drawings if drawing.adjustment is not None]
        slots, masked = len(self._entries), sum(drawing.is_masked for drawing in drawings)
        if masked > slots or not all(0 <= adjustment.slot < slots for adjustment in adjusting):
            raise ValueError(f"a step needs slot {max((a.slot for a in adjusting), default=-1)} and {masked} masks; "
                             f"{slots} of each are reserved")  # fmt: skip
        begins = {adjustment.slot: adjustment.begins for adjustment in adjusting if adjustment.begins is not None}
        if not begins:
            return
        states = [_state_of(beginning, self._vocabulary) for beginning in begins.values()]
        known = [np.flatnonzero(entries) for entries, _ in states]
        fields = Layout.of(
            [
                ("slots", "int64", (len(begins),)),
                ("biases", "float32", (len(begins), MOST_BIASES + 1)),
                ("places", "int64", (sum(map(len, known)),)),
                ("entries", "int32", (sum(map(len, known)),)),
            ]
        )
        host = self._outbound.next(fields.words)
        arrays = fields.arrays(host.numpy())
        arrays["slots"][:] = list(begins)
        arrays["biases"][:] = [biases for _, biases in states]
        arrays["places"][:] = np.concatenate(
            [slot * self._vocabulary + tokens for slot, tokens in zip(begins, known, strict=True)]
        )
        arrays["entries"][:] = np.concatenate(
            [entries[tokens] for (entries, _), tokens in zip(states, known, strict=True)]
        )
        sent = fields.tensors(self._outbound.send(host))
        self._entries.index_fill_(0, sent["slots"], 0)
        self._entries.view(-1).index_copy_(0, sent["places"], sent["entries"])
        self._biases.index_copy_(0, sent["slots"], sent["biases"])

    def send_masks(self, masks: Sequence[bytes]) -> None:
        """Start copying the masks of the next draw, in the order of its masked drawings."""
        if not masks:
            return
        words = self._masks.shape[1]
        host = self._outbound.next(len(masks) * words)
        rows = host.numpy().view(np.uint8).reshape(len(masks), 4 * words)
        for row, mask in zip(rows, masks, strict=True):
            row[: len(mask)] = np.frombuffer(mask, np.uint8)
            row[len(mask) :] = 0
        self._outbound.send(host, self._masks.view(-1)[: len(host)])

    def run(self, logits: Tensor, fields: Mapping[str, Tensor], *, truncated: bool) -> DrawnRows:
        """Draw a token for each row of `logits` [rows, vocabulary] by the `drawing_fields` of a step.

        Unless it is `truncated`, no row may have top-k, top-p or min-p.
        """
        draw = Draw(
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            seed=fields["seed"],
            position=fields["drawn_at"],
            top_logprobs=fields["top_logprobs"],
            adjustments=Adjustments(fields["adjusted"], fields["penalties"], self._entries, self._biases, self._masks),
            truncated=truncated,
        )
        return sample(logits, draw, pool=self._pool, target=fields["target"])


def state_bytes(vocabulary: int, rows: int) -> int:
    """The bytes that `Draws` keeps for `rows` rows."""
    return rows * 4 * (vocabulary + MOST_BIASES + 1 + -(-vocabulary // _MASK_BITS))


def _state_of(beginning: SlotState, vocabulary: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The entries [vocabulary] and biases [1024] of a slot. Raises ValueError for too many different biases."""
    prompt, answer = (np.frombuffer(part, "<u4").astype(np.int64) for part in (beginning.prompt, beginning.answer))
    counted = np.minimum(np.bincount(answer, minlength=vocabulary), MOST_COUNTED.value)
    entries = (counted << COUNT_SHIFT.value).astype(np.int32)
    entries[prompt] |= IN_PROMPT.value
    entries[list(beginning.stops)] |= ENDS.value
    biases = np.zeros(MOST_BIASES + 1, dtype=np.float32)
    if beginning.bias:
        values, places = np.unique([value for _, value in beginning.bias], return_inverse=True)
        if len(values) > MOST_BIASES:
            raise ValueError(f"a bias has {len(values)} different values, and there is room for {MOST_BIASES}")
        biases[1 : len(values) + 1] = values
        entries[[token for token, _ in beginning.bias]] |= (places.astype(np.int32) + 1) << BIAS_SHIFT.value
    return entries, biases
