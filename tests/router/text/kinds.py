"""Small tokenizers, one of each kind that models have, trained on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.text.text_tokenizer import ChunkCache, TextTokenizer
from shards.bundled import weights
from tests.router.parts import a_tokenizer

CORPUS = (
    'The quick brown fox jumps over the lazy dog, doesn\'t it? Mr. Ö said: "no".\n\n  def f(x): return x[0] / 2.5 + 1\n'
    "naïve café, из Москвы; 九十 天下\tand 3,000 of the other dogs of the town.\n" * 20
)
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDS = [AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True), AddedToken("</s>", special=True)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _bytes(pattern: str | None, *, added: list[AddedToken] | None = None, is_nfc: bool = False) -> Tokenizer:
    """Byte pairs behind `pattern`; None: over whole texts, so that tokens go over words."""
    tokenizer = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    if is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # without words, a whole text is one: short ones are enough for tokens that go over their ends
    tokenizer.train_from_iterator(CORPUS.split(". ") if pattern is None else [CORPUS], trainer)
    tokenizer.add_tokens([*ENDS, *(added or [])])
    return tokenizer


def _sentencepiece(*, prepends: bool, byte_fallback: bool = True) -> Tokenizer:
    """As Llama 2 has it, which `prepends` a space, or Gemma: byte pairs of characters over a text without spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepends else spaces
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *BYTES], show_progress=False)
    tokenizer.train_from_iterator([CORPUS.replace("九十 天下", "")], trainer)
    # the words of the training are no words of the model
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


KINDS = {
    "bundled": lambda: Tokenizer.from_file(str(weights() / "tokenizer.json")),
    "tests": a_tokenizer,
    "gpt-4": lambda: _bytes(GPT4),
    "qwen": lambda: _bytes(GPT4, is_nfc=True),
    "o200k": lambda: _bytes(O200K),
    "over words": lambda: _bytes(None),
    "strips": lambda: _bytes(GPT4, added=[AddedToken("the", rstrip=True), AddedToken("fox", lstrip=True)]),
    "odd tokens": lambda: _bytes(GPT4, added=[AddedToken("lazy dog"), AddedToken("a.b"), AddedToken("x\ny")]),
    "llama 2": lambda: _sentencepiece(prepends=True),
    "gemma": lambda: _sentencepiece(prepends=False),
    "unknown characters": lambda: _sentencepiece(prepends=False, byte_fallback=False),
    "bert": _bert,
    "unigram": _unigram,
}


@cache
def a_kind(name: str) -> Tokenizer:
    """The tokenizer `name` of KINDS."""
    return KINDS[name]()


@cache
def read(name: str) -> TextTokenizer:
    """The same as the router reads it."""
    return TextTokenizer(a_kind(name).to_str().encode(), ChunkCache())
