"""The tokenizer of a GGUF file, as a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shards.gguf.header import GgufHeader
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens, by gguf's `TokenType`."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")

PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT_2,),
    "olmo": (_GPT_2,),
    "smollm": (r"\p{N}", _GPT_2),
    "llama-bpe": (_LLAMA_3,),
    "dbrx": (_LLAMA_3,),
    "smaug-bpe": (_LLAMA_3,),
    "qwen2": (_QWEN_2,),
    "deepseek-r1-qwen": (_QWEN_2,),
    "gpt-4o": (_O200K,),
    "tekken": (_TEKKEN,),
}
"""`tokenizer.ggml.pre` -> the patterns that cut a text before tokens are merged, one behind the other.

Source: llama.cpp, llama-vocab.cpp.
"""


def tokenizer_of(header: GgufHeader) -> Tokenizer:
    """The tokenizer. Raises BrokenCheckpoint or UnsupportedCheckpoint."""
    kind, words = str(header.get("tokenizer.ggml.model", "")), header.get("tokenizer.ggml.tokens")
    if not words:
        raise BrokenCheckpoint(f"{header.path} has no tokenizer")
    vocabulary = {word: number for number, word in enumerate(words)}
    types: Sequence[int] = header.get("tokenizer.ggml.token_type") or [1] * len(words)
    if kind == "gpt2":
        tokenizer = _of_bytes(header, vocabulary)
    elif kind == "llama":
        tokenizer = _of_characters(header, vocabulary, words)
    else:
        raise UnsupportedCheckpoint(f"{header.path} has a tokenizer of kind '{kind}'", hint="supported: gpt2 and llama")
    added = [
        (word, each) for word, each in zip(words, types, strict=True) if each in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([AddedToken(word, special=each != _USER_DEFINED, normalized=False) for word, each in added])
    _begin(header, tokenizer, words)
    return tokenizer


def _of_bytes(header: GgufHeader, vocabulary: dict[str, int]) -> Tokenizer:
    pre = str(header.get("tokenizer.ggml.pre", "gpt-2"))
    if pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise UnsupportedCheckpoint(f"{header.path} cuts texts by '{pre}'", hint=f"supported: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in header.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[pre]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, whole])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_characters(header: GgufHeader, vocabulary: dict[str, int], words: Sequence[str]) -> Tokenizer:
    scores = dict(zip(words, header.get("tokenizer.ggml.scores") or [0.0] * len(words), strict=True))
    unknown = words[int(header.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = bool(header.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if has_prefix else [spaces])
    ending = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges with the effect of SentencePiece's scores: of what two neighbours make, the best piece comes first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for word, score in scores.items():
        for at in range(1, len(word)):
            left, right = word[:at], word[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _begin(header: GgufHeader, tokenizer: Tokenizer, words: Sequence[str]) -> None:
    """Have texts begin with the token that the file puts there."""
    number = header.get("tokenizer.ggml.bos_token_id")
    if number is None or not header.get("tokenizer.ggml.add_bos_token", header.get("tokenizer.ggml.model") == "llama"):
        return
    bos = words[int(number)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, int(number))]
    )
