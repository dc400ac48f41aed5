"""Prompts of six kinds, and small tokenizers of several kinds, for whatever estimates or counts lengths."""

from __future__ import annotations

import argparse
import ast
import configparser
import csv
import difflib
import dis
import ftplib
import heapq
import inspect
import json
import mailbox
import pickle
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from policies.learning.text_length import Measured, measured

ROOT = Path(__file__).parents[3]

KINDS = ("chat", "turns", "tools", "chinese", "json", "code")

Count = Callable[[str], int]
"""The tokens of a text, without what stands around texts."""


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_TIMES = _listed("今天 昨天 上周 去年 最近 每天 早上 晚上 以后 现在")
_WHO = _listed("我们 公司 老师 学生 工程师 医生 北京的市民 研究人员 政府部门 这家餐厅 许多用户")
_HOW = _listed("已经 正在 认真地 终于 不得不 可以 应该 经常 很快就 一起")
_DID = _listed("讨论 解决 发布 研究 使用 学习 改进 购买 参观 准备 支持 测试")
_WHAT = _listed(
    """
    新的系统 人工智能模型 数据库的性能 城市交通问题 开源软件 一份详细的报告 机器学习算法 中国历史
    电动汽车 环境保护的方法 服务器的内存 网络安全 复杂的数学公式 传统文化 手机应用程序 天气变化
    """
)
_WHY = _listed(
    """
    因为这对大家都很重要 但是结果并不理想 所以需要更多的时间 并且得到了广泛的关注
    为了提高工作效率 虽然成本有一点高 希望明年能够完成 这让很多人感到惊讶
    """
)

_SPLIT_AS_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Written(NamedTuple):
    """One prompt as a client sends it."""

    kind: str
    messages: tuple[Mapping[str, str], ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def tools_json(self) -> str:
        """Its tools as compact JSON; nothing without any."""
        return json.dumps(self.tools, separators=(",", ":")) if self.tools else ""


@cache
def english() -> tuple[str, ...]:
    """Prose: the pages of this project."""
    # where the mark stands a router writes documents, once
    return tuple(
        path.read_text().replace("{{documents}}", "documents") for path in sorted((ROOT / "docs").rglob("*.md"))
    )


@cache
def code() -> tuple[str, ...]:
    """Programs: modules of Python's own library, and the dashboard's scripts."""
    modules = (
        argparse,
        ast,
        configparser,
        csv,
        difflib,
        dis,
        ftplib,
        heapq,
        inspect,
        mailbox,
        pickle,
        random,
        textwrap,
    )
    scripts = sorted((ROOT / "router/operate/dashboard/static").glob("*.js"))
    return (*map(inspect.getsource, modules), *(path.read_text() for path in scripts))


def chinese(rng: random.Random, characters: int) -> str:
    """Sentences of so many characters or a few more."""
    sentences, length = [], 0
    while length < characters:
        parts = [rng.choice(_TIMES) + rng.choice(_WHO) + rng.choice(_HOW) + rng.choice(_DID) + rng.choice(_WHAT)]
        if rng.random() < 0.6:
            parts.append(rng.choice(_WHY))
        sentences.append("，".join(parts) + rng.choice("。。。！？\n"))
        length += len(sentences[-1])
    return "".join(sentences)


def prompts(count: int, seed: int, kinds: Sequence[str] = KINDS, *, most: int = 12_000) -> list[Written]:
    """So many prompts of `kinds` in a random order, of 40 to about `most` characters each."""
    rng = random.Random(seed)
    return [_prompt(rng, rng.choice(kinds), most) for _ in range(count)]


def _prompt(rng: random.Random, kind: str, most: int) -> Written:
    size = int(min(most, max(40, rng.lognormvariate(6.5, 1.1))))
    if kind == "turns":
        turns = 2 * rng.randrange(1, 5) + 1
        texts = [_some(rng, max(20, size // turns), rng.choice((english, english, code, None))) for _ in range(turns)]
        talk = [_message(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
        return Written(kind, (_message("system", "You are a helpful assistant."), *talk))
    if kind == "tools":
        asked = _message("user", _some(rng, max(30, size // 3), english))
        tools = tuple(_tool(rng) for _ in range(rng.randrange(1, 7)))
        return Written(kind, (_message("system", "You are an agent. Use the tools."), asked), tools)
    text = {
        "chat": lambda: _some(rng, size, english),
        "chinese": lambda: chinese(rng, max(20, size // 3)),
        "json": lambda: "Summarise this:\n" + _records(rng, size),
        "code": lambda: rng.choice(("Fix this:\n", "Explain:\n", "")) + _some(rng, size, code),
    }[kind]
    return Written(kind, (_message("user", text()),))


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _some(rng: random.Random, size: int, of: Callable[[], Sequence[str]] | None) -> str:
    if of is None:
        return chinese(rng, size // 3)
    text = rng.choice(of())
    while len(text) < size:
        text += "\n" + rng.choice(of())
    start = rng.randrange(max(1, len(text) - size))
    return text[start : start + size]


@cache
def _words() -> tuple[str, ...]:
    return tuple(sorted({word.lower() for word in re.findall(r"[A-Za-z]{3,12}", " ".join(english()))}))


def _records(rng: random.Random, size: int) -> str:
    rows: list[dict[str, Any]] = []
    length = 0
    while length < size:
        rows.append(
            {
                "id": rng.randrange(10**6),
                "uuid": f"{rng.getrandbits(128):032x}",
                "name": " ".join(rng.choices(_words(), k=2)),
                "price": round(rng.random() * 1000, 2),
                "active": rng.random() < 0.5,
                "tags": rng.choices(_words(), k=rng.randrange(4)),
                "created_at": f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}T{rng.randrange(24):02}:00:00Z",
            }
        )
        length += len(json.dumps(rows[-1]))
    return json.dumps(rows, indent=rng.choice((None, None, 2)))


def _tool(rng: random.Random) -> dict[str, Any]:
    properties = {
        rng.choice(_words()): {
            "type": rng.choice(("string", "integer", "boolean")),
            "description": " ".join(rng.choices(_words(), k=rng.randrange(4, 14))),
        }
        for _ in range(rng.randrange(1, 5))
    }
    function = {
        "name": "_".join(rng.choices(_words(), k=2)),
        "description": " ".join(rng.choices(_words(), k=rng.randrange(5, 20))),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
    }
    return {"type": "function", "function": function}


def as_bundled(written: Written, count: Count) -> int:
    """The tokens of `written` by the bundled model's chat template."""
    tools = 2 + count("Tools: " + json.dumps(written.tools)) if written.tools else 0
    return 2 + tools + sum(2 + count(message["content"]) for message in written.messages)


def as_chatml(written: Written, count: Count) -> int:
    """By a template that names each role in words, and prints tools on one line each below an instruction."""
    tools = 0
    if written.tools:
        lines = "\n".join(map(json.dumps, written.tools))
        tools = count(f"\n\n# Tools\n\nYou may call one or more functions.\n<tools>\n{lines}\n</tools>\n\nReturn JSON.")
    return 3 + tools + sum(3 + count(message["role"]) + count(message["content"]) for message in written.messages)


def as_llama(written: Written, count: Count) -> int:
    """By a template with a preamble, which prints tools on many lines."""
    tools = 60 + count("\n\n".join(json.dumps(tool, indent=4) for tool in written.tools)) if written.tools else 0
    return 30 + tools + sum(5 + count(message["content"].strip()) for message in written.messages)


def without_tools(written: Written, count: Count) -> int:
    """By a template that knows nothing of tools."""
    return 1 + sum(4 + count(message["content"]) for message in written.messages)


def _trained_on() -> list[str]:
    rng = random.Random(0)
    return [*english()[::2], *code()[::2], *(chinese(rng, 2000) for _ in range(20)), _records(rng, 20_000)]


def counting(tokenizer: Tokenizer) -> Count:
    """The token counter of `tokenizer`."""
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def byte_level(vocabulary: int, *, before: Any = None, texts: Sequence[str] | None = None) -> Count:
    """A byte-level BPE of so many tokens; `before` splits the text first, else as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_trained_on() if texts is None else texts, trainer)
    return counting(tokenizer)


def splits_as_gpt_4() -> Count:
    """A byte-level BPE with numbers of up to three digits each."""
    split = pre_tokenizers.Split(Regex(_SPLIT_AS_GPT_4), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(16_000, before=pre_tokenizers.Sequence([split, by_bytes]))


def splits_digits() -> Count:
    """A byte-level BPE in which each digit is a token."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return byte_level(8000, before=pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes]))


def word_pieces() -> Count:
    """A WordPiece as BERT's: spaces and line ends are no tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=12_000, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(_trained_on(), trainer)
    return counting(tokenizer)


def unigrams() -> Count:
    """A Unigram model as SentencePiece's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {"vocab_size": 8000, "unk_token": "<unk>", "special_tokens": ["<unk>"], "show_progress": False}
    # fewer rounds, from fewer pieces, than a real vocabulary has: training took three times as long as its tests
    trainer = trainers.UnigramTrainer(n_sub_iterations=1, shrinking_factor=0.4, seed_size=30_000, **options)
    tokenizer.train_from_iterator(_trained_on(), trainer)
    return counting(tokenizer)


def bundled() -> Count:
    """The bundled model's own."""
    tokenizer = Tokenizer.from_file(str(ROOT / "shards/bundled/weights/tokenizer.json"))
    tokenizer.no_truncation()
    return counting(tokenizer)


TOKENIZERS: dict[str, tuple[Callable[[], Count], Callable[[Written, Count], int]]] = {
    "bundled, 4k": (bundled, as_bundled),
    "byte-level BPE, 2k": (lambda: byte_level(2000), as_llama),
    "byte-level BPE, 16k, digits by 3": (splits_as_gpt_4, as_llama),
    "byte-level BPE, 8k, single digits": (splits_digits, as_chatml),
    "byte-level BPE, 8k, English only": (lambda: byte_level(8000, texts=english()), as_chatml),
    "WordPiece, 12k": (word_pieces, as_chatml),
    "Unigram, 8k": (unigrams, as_chatml),
}
"""Name -> how it is made, and the chat template that its prompts have."""


def measured_prompt(written: Written) -> Measured:
    """The router's measures of `written`."""
    texts = [message["content"] for message in written.messages if message["role"] != "assistant"]
    replies = [message["content"] for message in written.messages if message["role"] == "assistant"]
    tools = written.tools_json
    return measured(texts, replies=replies, is_chat=True, tools=len(written.tools), tool_bytes=len(tools.encode()))
