"""Secrets and other values from outside the file: `${env:NAME}` and `${file:path}`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from policies.shapes import Scalar
from policies.sla.fields import Unchecked

REFERENCE_PATTERN = r"\$\{(env|file):([^}]+)\}"
_REFERENCE = re.compile(REFERENCE_PATTERN)

API_KEY = Scalar(
    str, {"type": "string", "pattern": rf"^\s*([Ss][Hh][Aa]256:[0-9A-Fa-f]{{64}}|{REFERENCE_PATTERN})\s*$"}
)
"""The forms of a client's or operator's key in the file."""

_HASH = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


class _Absent(ValueError):
    """A reference has no value here."""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outside:
    """Resolves references: the environment, and a reader of files (None: files cannot be read here).

    `check_option` checks one option of a pool: its kind, whether its shards are local, the option's name and value.
    `doubt_tokenizer` describes a possible problem of a tokenizer of this name, `doubt_keys` one of a file with an
    issuer's keys, None if there is none. `check_template` checks a file with a chat template. All but the doubts raise
    ValueError with a sentence for unusable values.

    `may_be_absent`: a reference without a value is no mistake. It raises Unchecked with something in its place.
    """

    environment: Mapping[str, str]
    read_file: Callable[[str], str] | None = None
    doubt_tokenizer: Callable[[str], str | None] = lambda _: None
    doubt_keys: Callable[[str], str | None] = lambda _: None
    check_template: Callable[[str], None] = lambda _: None
    check_option: Callable[[str, bool, str, str | tuple[str, ...]], None] = lambda *_: None
    may_be_absent: bool = False

    def resolve(self, text: str, stand_in: Callable[[str], object] = lambda _: None) -> str:
        """`text`, or the value that it refers to. Raises ValueError with a sentence, never with a secret in it.

        `stand_in` makes the value of an Unchecked from a name that is different for each reference.
        """
        reference = _REFERENCE.fullmatch(text)
        if reference is None:
            if "${" in text:
                raise ValueError("must be a whole ${env:NAME} or ${file:path}, with nothing around it")
            return text
        try:
            value = self._environment_value(reference[2]) if reference[1] == "env" else self._file_text(reference[2])
            if not value.strip():
                raise _Absent(f"{text} is empty")
        except _Absent as absent:
            if not self.may_be_absent:
                raise
            name = f"absent-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
            raise Unchecked(str(absent), stand_in(name)) from None
        return value.strip()

    def secret(self, text: str) -> str:
        """The value that `text` refers to. ValueError if it is no reference: a secret must not stand in the file."""
        if not _REFERENCE.fullmatch(text):
            raise ValueError("a secret must not stand in the file (write ${env:NAME} or ${file:path})")
        return self.resolve(text, str)

    def key_hash(self, text: str) -> str:
        """The sha256 hex digest of a client's key, given as `sha256:...` or by reference."""
        if given := _HASH.fullmatch(text):
            return given[1].lower()
        if text.lower().startswith("sha256:"):
            raise ValueError("sha256: must be followed by 64 hexadecimal digits")
        if "${" not in text:
            digest = _sha256(text)
            raise ValueError(f"a key must not stand in plain text in the file (write sha256:{digest} or ${{env:NAME}})")
        value = self.resolve(text, _sha256)
        hashed = _HASH.fullmatch(value)
        return hashed[1].lower() if hashed else _sha256(value)

    def _environment_value(self, name: str) -> str:
        if name not in self.environment:
            raise _Absent(f"the environment variable {name} is not set")
        return self.environment[name]

    def _file_text(self, path: str) -> str:
        if self.read_file is None:
            raise ValueError("files cannot be read here")
        try:
            return self.read_file(path)
        except FileNotFoundError as error:
            raise _Absent(f"cannot read {path}: {error.strerror or error}") from error
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"cannot read {path}: {error}") from error
