"""Answers in OpenAI's shapes: whole, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.api import LLM
from foretell.engine import Request
from foretell.models.tokenizer import Piece as TokenPiece
from foretell.server.errors import ApiError
from foretell.server.jobs import Job, Piece
from foretell.server.logprobs import chat_logprobs, completion_logprobs
from foretell.server.schemas import ChatRequest, CompletionRequest, Sampled
from foretell.server.tools import CallReader, render

TARGET = "target"  # who proposed a token that no drafter did


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What ids stand for, and who may propose them."""

    pieces: list[TokenPiece | None]
    drafters: tuple[str, ...]

    @classmethod
    def of(cls, llm: LLM) -> Vocabulary:
        """The model's."""
        return cls(llm.tokenizer.pieces(), llm.origins)

    def data(self, token_id: int) -> bytes:
        """The bytes of a token; ids that only pad the model's vocabulary have none."""
        piece = self.pieces[token_id] if token_id < len(self.pieces) else None
        return b"" if piece is None else piece.data

    def text(self, token_id: int) -> str:
        """A token as text; bytes that are no whole character are written out."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def proposer(self, origin: int) -> str:
        """The drafter's name."""
        return TARGET if origin < 0 else self.drafters[min(origin, len(self.drafters) - 1)]

    def tokens(self, piece: Piece, top: int | None) -> list[dict[str, Any]]:
        """The tokens of a piece, as `foretell.tokens` tells them, with `top` alternatives."""
        told = []
        for place, token_id in enumerate(piece.token_ids):
            origin = piece.origins[place]
            known = {"drafted": origin >= 0, "origin": self.proposer(origin), "place": piece.places[place]}
            told.append({**self._named(token_id), **known})
            if top is not None:
                entry = piece.logprobs[place]
                first = list(entry.top.items())[:top]
                others = [{**self._named(other), "logprob": logprob} for other, logprob in first]
                told[-1] |= {"logprob": entry.logprob, "top": others}
        return told

    def _named(self, token_id: int) -> dict[str, Any]:
        """Id and text; the bytes where they are no whole characters, and whether it is a special token, of
        which the answer's text has nothing."""
        piece = self.pieces[token_id] if token_id < len(self.pieces) else None
        named: dict[str, Any] = {"id": token_id, "text": self.text(token_id)}
        if piece is None or piece.special:
            named["special"] = True
        elif named["text"].startswith("bytes:") and not piece.data.startswith(b"bytes:"):
            named["bytes"] = list(piece.data)
        return named


@dataclass(slots=True)
class _Choice:
    """One answer as far as it has come."""

    pieces: list[Piece] = field(default_factory=list)
    reader: CallReader = field(default_factory=CallReader)
    length: int = 0  # characters of what was written


class Writer:
    """Writes a job's answers.

    Args:
        asked: the request's body.
        vocabulary: the model's.
        fingerprint: what answers depend on beside the request: model and how it is run.
    """

    def __init__(self, asked: Sampled, vocabulary: Vocabulary, fingerprint: str) -> None:
        self._asked = asked
        self._vocabulary = vocabulary
        self._chat = isinstance(asked, ChatRequest)
        self._calls = isinstance(asked, ChatRequest) and bool(asked.callable[0])
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if asked.stream and self._chat else ""),
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }
        self._choices: dict[int, _Choice] = {}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        """Chunks before the first token: a chat says who speaks."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(answers)
        ]

    def chunk(self, piece: Piece, request: Request) -> dict[str, Any]:
        """A piece as a chunk."""
        choice = self._choices.setdefault(piece.index, _Choice())
        logprobs = self._logprobs(piece, choice.length)
        choice.length += len(piece.text)
        out: dict[str, Any] = {"index": piece.index, "logprobs": logprobs}
        out["finish_reason"] = piece.finish_reason
        if self._calls:
            out["delta"] = self._call_delta(choice, piece)
            out["finish_reason"] = _finish(choice, piece)
        elif self._chat:
            out["delta"] = {"content": piece.text} if piece.text else {}
        else:
            out["text"] = piece.text
        return self._chunk(out) | self._ours(piece, request)

    def add(self, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        self._choices.setdefault(piece.index, _Choice()).pieces.append(piece)

    def whole(self, job: Job) -> dict[str, Any]:
        """All answers at once."""
        choices = [self._whole_choice(index, self._choices[index]) for index in range(job.answers)]
        out = {**self._head, "choices": choices, "usage": self.usage(job)}
        return out | self._ours_whole(job)

    def closing(self, job: Job) -> list[dict[str, Any]]:
        """Chunks behind the last token: what was used, where that is wanted."""
        options = self._asked.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self.usage(job)}]

    def usage(self, job: Job) -> dict[str, Any]:
        """Tokens read and written; a prompt counts once for all its answers."""
        first = job.requests[:: self._asked.n]
        prompt = sum(request.prompt_length for request in first)
        written = sum(request.emitted for request in job.requests)
        cached = sum(request.stats.reused for request in first)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        options = self._asked.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, last = "".join(piece.text for piece in choice.pieces), choice.pieces[-1]
        ids = tuple(i for piece in choice.pieces for i in piece.token_ids)
        origins = tuple(o for piece in choice.pieces for o in piece.origins)
        places = tuple(p for piece in choice.pieces for p in piece.places)
        logprobs = tuple(p for piece in choice.pieces for p in piece.logprobs)
        joined = Piece(index, text, ids, origins, places, logprobs, last.seconds, last.finish_reason)
        out: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(joined, 0),
            "finish_reason": last.finish_reason,
        }
        if self._calls:
            out["message"] = {"role": "assistant", "content": None, **self._call_delta(choice, joined)}
            out["finish_reason"] = _finish(choice, joined)
            for call in out["message"].get("tool_calls", ()):
                del call["index"]
        elif self._chat:
            out["message"] = {"role": "assistant", "content": text}
        else:
            out["text"] = text
        if self._asked.foretell.tokens:
            out["foretell"] = {"tokens": self._vocabulary.tokens(joined, self._asked.foretell.top)}
        return out

    def _call_delta(self, choice: _Choice, piece: Piece) -> dict[str, Any]:
        """What a piece adds to text and calls."""
        deltas = choice.reader.push(piece.text)
        if piece.finish_reason is not None:
            deltas += choice.reader.end()
        found: dict[str, Any] = {}
        if text := "".join(delta.text for delta in deltas if delta.call is None):
            found["content"] = text
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if delta.call is None:
                continue
            call = calls.setdefault(delta.call, {"index": delta.call, "function": {"arguments": ""}})
            if delta.name is not None:
                call |= {"id": f"call-{self._head['id']}-{piece.index}-{delta.call}", "type": "function"}
                call["function"] = {"name": delta.name, **call["function"]}
            call["function"]["arguments"] += delta.text
        return found | ({"tool_calls": list(calls.values())} if calls else {})

    def _logprobs(self, piece: Piece, before: int) -> dict[str, Any] | None:
        if (most := self._asked.alternatives) is None:
            return None
        entries = [replace(e, top=dict(list(e.top.items())[:most])) for e in piece.logprobs]
        if self._chat:
            return chat_logprobs(entries, self._vocabulary)
        return completion_logprobs(entries, self._vocabulary, before)

    def _ours(self, piece: Piece, request: Request) -> dict[str, Any]:
        """The field `foretell` of a chunk: the tokens where they are wanted; behind the last, the answer's
        facts. A lossy answer says so in any case."""
        found: dict[str, Any] = {}
        if self._asked.foretell.tokens:
            found["tokens"] = self._vocabulary.tokens(piece, self._asked.foretell.top)
        if piece.finish_reason is not None and self._asked.foretell.tokens:
            found |= _facts([request])
        elif piece.finish_reason is not None and not request.lossless:
            found["lossless"] = False
        return {"foretell": found} if found else {}

    def _ours_whole(self, job: Job) -> dict[str, Any]:
        if self._asked.foretell.tokens:
            return {"foretell": _facts(job.requests)}
        lossless = all(request.lossless for request in job.requests)
        return {} if lossless else {"foretell": {"lossless": False}}


def _finish(choice: _Choice, piece: Piece) -> str | None:
    """An answer that calls ends with its calls, unless it was cut off."""
    return "tool_calls" if piece.finish_reason == "stop" and choice.reader.calls else piece.finish_reason


def _facts(requests: Sequence[Request]) -> dict[str, Any]:
    return {
        "lossless": all(request.lossless for request in requests),
        "seeds": [request.seed for request in requests],
        "stats": [request.stats.to_json() for request in requests],
    }


def prompts_of(asked: Sampled, llm: LLM) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        InputError: a prompt that the tokenizer or the chat template refuses.
        ApiError: a message without content that holds no calls either.
    """
    if isinstance(asked, ChatRequest):
        for place, message in enumerate(asked.messages):
            if message.content is None and not (message.role == "assistant" and message.tool_calls):
                field = f"messages.{place}.content"
                raise ApiError(400, f"{field} is missing", param=field, code="missing_required_parameter")
        messages, (tools, _) = [message.plain() for message in asked.messages], asked.callable
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            return [llm.tokenizer.encode(render(llm.tokenizer, messages, tools), special=False)]
        return [llm.encode(messages)]
    assert isinstance(asked, CompletionRequest)
    return [llm.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in asked.prompts]
