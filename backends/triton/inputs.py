"""The inputs for a text model on Triton, by the names that it declares. Pure.

Source: TensorRT-LLM's Triton models (inflight_batcher_llm's ensemble and BLS, llmapi): their config.pbtxt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.http.unsupported import refuse_unknown, refuse_unsupported
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Request

_LLMAPI = "sampling_param_"
"""Prefix of the llmapi model for names of sampling parameters."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", f"{_LLMAPI}max_tokens"),
    "temperature": ("temperature", f"{_LLMAPI}temperature"),
    "top_p": ("top_p", f"{_LLMAPI}top_p"),
    "top_k": ("top_k", f"{_LLMAPI}top_k"),
    "repetition_penalty": ("repetition_penalty", f"{_LLMAPI}repetition_penalty"),
    "presence_penalty": ("presence_penalty", f"{_LLMAPI}presence_penalty"),
    "frequency_penalty": ("frequency_penalty", f"{_LLMAPI}frequency_penalty"),
    "seed": ("seed", f"{_LLMAPI}seed"),
    "min_new_tokens": ("min_tokens", f"{_LLMAPI}min_tokens"),
    "stop": ("stop_words", f"{_LLMAPI}stop"),
    "streamed": ("stream", "streaming"),
    "without_prompt": ("exclude_input_in_output", f"{_LLMAPI}exclude_input_from_output"),
    "prompt_tokens": ("return_num_input_tokens",),
    "reason": ("return_finish_reason",),
}
"""Meaning -> possible names of the input."""

_ROUTERS = frozenset({"text_input", "input_ids"}).union(*_NAMES.values())
"""Inputs that are filled here, in place of a client's own."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A model's `inputs`, each with its datatype, and the names of its `outputs`. `is_batched`: shapes begin with 1."""

    inputs: Mapping[str, str]
    outputs: frozenset[str]
    is_batched: bool = True

    @property
    def is_text_model(self) -> bool:
        """It takes and gives text."""
        return "text_input" in self.inputs and "text_output" in self.outputs

    @property
    def can_be_stopped(self) -> bool:
        """A second request of the same id stops the first."""
        return "stop" in self.inputs

    def name_of(self, meaning: str) -> str | None:
        """This model's name for `meaning`; None if it has no such input."""
        return next((name for name in _NAMES[meaning] if name in self.inputs), None)


def signature_of(metadata: Any) -> Signature:
    """The signature in a reply to GET /v2/models/M. Raises BackendFailed at nonsense."""
    try:
        inputs = {str(tensor["name"]): str(tensor["datatype"]) for tensor in metadata["inputs"]}
        ranks = {str(tensor["name"]): len(tensor["shape"]) for tensor in metadata["inputs"]}
        outputs = frozenset(str(tensor["name"]) for tensor in metadata["outputs"])
        return Signature(inputs, outputs, is_batched=ranks.get("text_input", 2) > 1)
    except (KeyError, TypeError) as error:
        raise BackendFailed("Triton's description of a model is not valid") from error


def inputs_of(request: Request, body: Mapping[str, Any], signature: Signature) -> dict[str, Any]:
    """Input -> value, one or a list. Inputs of the model's own that a client named in its body go along.

    Raises InvalidRequest for fields without an input of the model.
    """
    text = body.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest(
            "this model on Triton takes text, not messages or token ids",
            hint="send a text completion",
            param="messages" if "messages" in body else "prompt",
        )
    sampling, own = request.sampling, signature.inputs.keys() - _ROUTERS
    refuse_unknown(body, own, "this model on Triton")
    knows = {meaning for meaning in _NAMES if signature.name_of(meaning)}
    # greedy sampling is sent as top_k
    refuse_unsupported(sampling, knows | ({"temperature"} if "top_k" in knows else set()), "this model on Triton")
    is_greedy = sampling.temperature == 0
    given = {
        "max_tokens": request.max_new_tokens,
        "temperature": None if is_greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 1 if is_greedy else sampling.top_k or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "seed": sampling.seed,
        "min_new_tokens": sampling.min_new_tokens or None,
        "stop": list(sampling.stop) or None,
        "streamed": True,
        "without_prompt": True,
        "prompt_tokens": True,
        "reason": True,
    }
    named = {signature.name_of(meaning): value for meaning, value in given.items() if value is not None}
    sent = {name: value for name, value in named.items() if name is not None}
    return {"text_input": text, **{name: body[name] for name in own if body.get(name) is not None}, **sent}
