"""Fields of OpenAI's API, vLLM, SGLang, llama.cpp and TGI that change an answer and that our own shards do not do: they
are refused by name, as an answer without them would be another one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from policies.errors import InvalidRequest
from policies.suggest import nearest

READ = frozenset(
    [
        "add_generation_prompt",
        "add_special_tokens",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "document_order",
        "document_set",
        "documents",
        "ebnf",
        "echo",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt",
        "reasoning_effort",
        "regex",
        "repetition_penalty",
        "response_format",
        "reuse",
        "reuse_budget",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "structured_outputs",
        "suffix",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
        "user",
    ]
)
"""Fields of a chat and of a text that `router/protocols/openai/fields.py` reads, whatever they ask for."""

_LIKENESS = 0.85
"""From here on an unknown field counts as a misspelled one: `max_token`, `temperatur`, `top_log_probs`."""

_HARMLESS = frozenset({"models", "min_tokens_to_sample"})
"""Fields of other APIs that look like one that is read."""

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_ONLY_NONE: tuple[Any, ...] = (None,)

_OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # vLLM
        "allowed_token_ids": _ONLY_NONE,
        "bad_words": _NOTHING,
        "include_reasoning": (None, True),
        "length_penalty": (None, 0, 1),
        "logits_processors": _NOTHING,
        "logprob_token_ids": _NOTHING,
        "prompt_embeds": _NOTHING,
        "prompt_logprobs": (None, False),
        "repetition_detection": _NOTHING,
        "return_token_ids": _NOTHING,
        "return_tokens_as_token_ids": _NOTHING,
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "thinking_token_budget": _ONLY_NONE,
        "use_beam_search": _NOTHING,
        "vllm_xargs": _NOTHING,
        # SGLang
        "custom_logit_processor": _NOTHING,
        "custom_params": _NOTHING,
        "input_embeds": _NOTHING,
        "lora_path": _NOTHING,
        "no_stop_trim": _NOTHING,
        "return_hidden_states": _NOTHING,
        "separate_reasoning": (None, True),
        "stop_regex": _NOTHING,
        "stream_reasoning": (None, True),
        # llama.cpp, Ollama, TGI
        "decoder_input_details": _NOTHING,
        "do_sample": (None, True),
        "dry_multiplier": _NOTHING,
        "dynatemp_range": _NOTHING,
        "grammar": _NOTHING,
        "json_schema": _NOTHING,
        "mirostat": _NOTHING,
        "n_predict": (None, -1),
        "n_probs": _NOTHING,
        "num_predict": (None, -1),
        "repeat_penalty": (None, 1),
        "return_full_text": _NOTHING,
        "samplers": _NOTHING,
        "tfs_z": (None, 1),
        "top_a": _NOTHING,
        "top_n_tokens": _NOTHING,
        "typical_p": (None, 1),
        "watermark": _NOTHING,
        "xtc_probability": _NOTHING,
        # OpenAI
        "audio": _NOTHING,
        "function_call": (None, "none", "auto"),
        "functions": _NOTHING,
        "modalities": (None, [], ["text"]),
        "web_search_options": _ONLY_NONE,
    }
)
"""Name of a field -> its values that ask for nothing."""

_INSTEAD = MappingProxyType(
    {
        "audio": "ask for text",
        "function_call": "say `tool_choice`",
        "functions": "say `tools`",
        "grammar": "say `structured_outputs.grammar`",
        "json_schema": "say `response_format`",
        "lora_path": "name the adapter as `model`",
        "n_predict": "say `max_tokens`",
        "n_probs": "say `logprobs`",
        "num_predict": "say `max_tokens`",
        "repeat_penalty": "say `repetition_penalty`",
    }
)


def refuse_undone(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first field of `body`, a chat or a text for shards, that they do not do, or that is
    a misspelled one."""
    for name in body.keys() - READ - _HARMLESS:
        if name in _OFF:
            # False equals 0, and True equals 1: compared with their types
            if not any(type(body[name]) is type(off) and body[name] == off for off in (*_OFF[name], *_floats(name))):
                raise _undone(name, _INSTEAD.get(name, f"leave `{name}` out, or ask for a model of another engine"))
        elif (meant := nearest(name, READ, cutoff=_LIKENESS)) is not None:
            hint = f"did you mean '{meant}'?"
            raise InvalidRequest(f"the field '{name[:80]}' is not known", hint=hint, param=name)


def _floats(name: str) -> tuple[float, ...]:
    return tuple(float(off) for off in _OFF[name] if type(off) is int)


def _undone(name: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"this model's shards do not do `{name}`", hint=hint, param=name)
