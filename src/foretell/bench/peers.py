"""Other engines on the same prompts and token counts, greedily and one prompt at a time.

They are extras: one that is not installed, or cannot run this model, is skipped by name. Each runs with as
many threads as foretell does.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.bench.items import Item
from foretell.bench.methods import Answer, Foretell, Method, Unavailable
from foretell.errors import InputError
from foretell.models.catalog import locate
from foretell.models.load import LoadedModel
from foretell.types import SamplingParams

_LOOKUP = 10  # tokens of a prompt-lookup draft


@dataclass(frozen=True, slots=True)
class Given:
    """What peers run on.

    Args:
        gguf: the model as published for llama.cpp, where there is such a file; `assistant_gguf` likewise.
        context: tokens of the longest prompt with its answer.
    """

    loaded: LoadedModel
    context: int
    gguf: Path | None = None
    assistant: str | None = None
    assistant_gguf: Path | None = None


class _Peer:
    """One prompt at a time, greedily."""

    batches = samples = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.reference = name.partition(":")[0]

    def begin(self) -> None:
        """Nothing is left of earlier answers."""

    def answer(self, items: Sequence[Item], params: SamplingParams) -> list[Answer]:
        """See `Method`."""
        assert params.greedy
        (item,) = items
        return [self._one(item)]

    def _one(self, item: Item) -> Answer:
        raise NotImplementedError


class Transformers(_Peer):
    """transformers' generate in fp32: plain, prompt lookup, or with an assistant model."""

    def __init__(self, name: str, mode: str, given: Given) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(name)
        load = AutoModelForCausalLM.from_pretrained
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP} if mode == "pld" else {}
        if mode == "assistant":
            if given.assistant is None:
                raise Unavailable("it needs --assistant MODEL")
            helper = load(locate(given.assistant), dtype=torch.float32).eval()
            self._options = {"assistant_model": helper}
        self._model: Any = load(given.loaded.folder, dtype=torch.float32).eval()
        self._ends = sorted(given.loaded.end_ids)

    def _one(self, item: Item) -> Answer:
        from transformers.generation.streamers import BaseStreamer

        times: list[tuple[float, int]] = []

        class Clock(BaseStreamer):  # type: ignore[misc]
            def put(self, value: Any) -> None:
                times.append((time.perf_counter(), value.numel()))

            def end(self) -> None: ...

        start = time.perf_counter()
        with torch.inference_mode():
            ids = self._model.generate(
                torch.tensor([item.ids]),
                max_new_tokens=item.max_tokens,
                do_sample=False,
                eos_token_id=self._ends or None,
                pad_token_id=0,
                streamer=Clock(),
                **self._options,
            )
        return Answer.timed(ids[0, len(item.ids) :].tolist(), start, times[1:])  # the first is the prompt


class LlamaCpp(_Peer):
    """llama.cpp's server through xllamacpp, in this process, on a .gguf file: plain, with a draft model, or
    in one of its n-gram modes."""

    def __init__(self, name: str, mode: str, given: Given) -> None:
        import xllamacpp

        super().__init__(name)
        if given.gguf is None:
            raise Unavailable("it needs the model's .gguf file: --gguf PATH")
        params = xllamacpp.CommonParams()
        params.model.path = str(given.gguf)
        params.n_ctx, params.n_parallel, params.verbosity = given.context + 64, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        if mode:
            if mode == "draft":
                if given.assistant_gguf is None:
                    raise Unavailable("it needs the assistant's .gguf file: --assistant-gguf PATH")
                params.speculative.draft.mparams.path = str(given.assistant_gguf)
            kind = "DRAFT_SIMPLE" if mode == "draft" else mode.upper().replace("-", "_")
            wanted = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")
            params.speculative.types = [wanted]
        self._server = xllamacpp.Server(params)
        self._encode = given.loaded.tokenizer.encode

    def _one(self, item: Item) -> Answer:
        times: list[tuple[float, int]] = []
        parts: list[str] = []
        usage: dict[str, Any] = {}

        def arrived(chunk: Any) -> None:
            if "choices" not in chunk:
                raise Unavailable(f"it answered {str(chunk)[:200]}")
            if text := chunk["choices"][0]["text"]:
                times.append((time.perf_counter(), 1))
                parts.append(text)
            usage.update(chunk.get("usage") or {})

        start = time.perf_counter()
        self._server.handle_completions(
            {
                "prompt": list(item.ids),
                "n_predict": item.max_tokens,
                "temperature": 0.0,
                "stream": True,
                "cache_prompt": False,
            },
            arrived,
        )
        if usage.get("prompt_tokens") != len(item.ids):
            raise Unavailable(f"it read {usage.get('prompt_tokens')} tokens of a prompt of {len(item.ids)}")
        ids = self._encode("".join(parts), special=False)
        return Answer.timed(ids, start, times, count=int(usage["completion_tokens"]))


class OpenVino(_Peer):
    """OpenVINO GenAI on a .gguf file: plain or prompt lookup."""

    def __init__(self, name: str, mode: str, given: Given) -> None:
        import openvino_genai

        super().__init__(name)
        if given.gguf is None:
            raise Unavailable("it needs the model's .gguf file: --gguf PATH")
        lookup = {"prompt_lookup": True} if mode == "pld" else {}
        threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._pipe = openvino_genai.LLMPipeline(str(given.gguf), "CPU", **lookup, **threads)
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        if given.loaded.end_ids:
            self._config.stop_token_ids = set(given.loaded.end_ids)
        if lookup:
            self._config.num_assistant_tokens, self._config.max_ngram_size = 5, 3

    def _one(self, item: Item) -> Answer:
        import numpy as np
        import openvino
        import openvino_genai

        times: list[tuple[float, int]] = []

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, tokens: Any) -> Any:
                times.append((time.perf_counter(), len(tokens) if isinstance(tokens, list) else 1))
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        self._config.max_new_tokens = item.max_tokens
        start = time.perf_counter()
        ids = openvino.Tensor(np.array([item.ids], dtype=np.int64))
        found = self._pipe.generate(ids, self._config, Clock())
        return Answer.timed(list(found.tokens[0]), start, times)


class Vllm(_Peer):
    """vLLM offline in fp32: plain, or with its n-gram or suffix drafter. Arrivals of single tokens are not
    told by its offline interface: it is timed as a whole."""

    def __init__(self, name: str, mode: str, given: Given) -> None:
        import vllm

        super().__init__(name)
        drafts: dict[str, Any] = {"method": mode, "num_speculative_tokens": _LOOKUP}
        if mode == "ngram":
            drafts["prompt_lookup_max"] = 3
        self._engine = vllm.LLM(
            model=str(given.loaded.folder),
            dtype="float32",
            max_model_len=given.context + 64,
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculative_config=drafts if mode else None,
        )
        self._params = vllm.SamplingParams
        self._ends = sorted(given.loaded.end_ids)

    def _one(self, item: Item) -> Answer:
        params = self._params(temperature=0.0, max_tokens=item.max_tokens, stop_token_ids=self._ends)
        start = time.perf_counter()
        (found,) = self._engine.generate({"prompt_token_ids": list(item.ids)}, params, use_tqdm=False)
        metrics = getattr(found, "metrics", None)
        first = getattr(metrics, "first_token_latency", None) or time.perf_counter() - start
        return Answer(list(found.outputs[0].token_ids), first)


_LLAMA_MODES = ("draft", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_ENGINES: dict[str, tuple[str, Callable[[str, str, Given], Method], tuple[str, ...]]] = {
    "transformers": ("transformers", Transformers, ("pld", "assistant")),
    "llama.cpp": ("xllamacpp", LlamaCpp, _LLAMA_MODES),
    "openvino": ("openvino_genai", OpenVino, ("pld",)),
    "vllm": ("vllm", Vllm, ("ngram", "suffix")),
}


def build(name: str, given: Given, make: Callable[[str], list[Foretell]]) -> Sequence[Method]:
    """A method by name: a peer, or foretell with a drafter, on every kind of weights.

    Raises:
        Unavailable: a peer that is not installed, or cannot run this model.
        InputError: no such drafter or mode, or a bad option.
    """
    engine, _, mode = name.partition(":")
    if engine not in _ENGINES:
        return make(name)
    package, kind, modes = _ENGINES[engine]
    if name != engine and mode not in modes:
        raise InputError(f"{engine} has no mode {mode!r} here", hint=f"one of: {', '.join(modes)}")
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    try:
        return [kind(name, mode, given)]
    except InputError:  # what the user gave is wrong, not what this machine lacks
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise Unavailable(str(error).strip().partition("\n")[0] or type(error).__name__) from error
