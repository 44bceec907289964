"""Text to ids and back, and chat messages to text, from a model folder.

`tokenizers` and a Jinja environment, without the import of transformers (seconds). A folder that has
no tokenizer.json is converted by transformers.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from foretell.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template

# transformers' own tag around what the assistant says; it marks training masks and prints nothing
_GENERATION_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class Piece(NamedTuple):
    """What a token stands for: bytes of text, or a special token's name."""

    data: bytes
    special: bool


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        size: ids that the tokenizer knows; a model's logits may be wider.
        chat_template: Jinja source, or None.

    Raises:
        InputError: the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fast = _load(folder)
        self.size = self._fast.get_vocab_size(with_added_tokens=True)
        self._config = _read_json(folder / "tokenizer_config.json")
        self.chat_template = _chat_template(folder, self._config)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; `special` adds what the model puts around a raw text (BOS)."""
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no full character become U+FFFD."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """The text of one id, special tokens included."""
        text = str(self._fast.decode([token_id], skip_special_tokens=False))
        return text or str(self._fast.id_to_token(token_id) or "")

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether both map the same strings to the same ids."""
        return bool(self._fast.get_vocab() == other._fast.get_vocab())

    def pieces(self) -> list[Piece | None]:
        """What every id stands for; None for ids without a token."""
        byte_level = "ByteLevel" in repr(self._fast.decoder)
        out: list[Piece | None] = [None] * (1 + max(self._fast.get_vocab().values()))
        for token, token_id in self._fast.get_vocab(with_added_tokens=False).items():
            data = _bytes_of_byte_level(token) if byte_level else _bytes_of_sentence_piece(token)
            out[token_id] = Piece(data, False)
        for token_id, added in self._fast.get_added_tokens_decoder().items():
            out[token_id] = Piece(added.content.encode(), bool(added.special))
        return out

    @property
    def end_ids(self) -> frozenset[int]:
        """The end token that the tokenizer's own configuration names, if any."""
        token = self._fast.token_to_id(_token_text(self._config.get("eos_token")))
        return frozenset() if token is None else frozenset([token])

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt text of a conversation, up to where the assistant speaks.

        Args:
            tools: functions that the assistant may call, for templates that tell it of them.

        Raises:
            InputError: the model has no chat template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise InputError(f"{self.folder.name} has no chat template", hint="prompt it raw (--raw)")
        from jinja2 import TemplateError

        _check_messages(messages)
        special = {
            name: _token_text(self._config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        try:
            given = {"tools": tools, "documents": None}
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **given, **special
            )
        except TemplateError as error:
            raise InputError(
                f"the chat template of {self.folder.name} refuses these messages: {error}"
            ) from error

    @functools.cached_property
    def _template(self) -> Template:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        assert self.chat_template is not None
        return environment.from_string(_GENERATION_TAG.sub("", self.chat_template))


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others are moved up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


def _bytes_of_byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()


def _bytes_of_sentence_piece(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def _check_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"a message's {key} must be text, got {message.get(key)!r}")


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _token_text(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return "" if value is None else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _load(folder: Path) -> FastTokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{path} is damaged: {error}") from error
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise InputError(f"{folder} has no tokenizer (tokenizer.json is missing)")
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the converter of that family raises
        raise InputError(f"the tokenizer of {folder} cannot be converted: {error}") from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, FastTokenizer):
        raise InputError(f"the tokenizer of {folder} has no fast form (tokenizer.json)")
    return backend


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
