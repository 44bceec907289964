"""What the target computes on its own answers, kept in shards on disk as far as a limit allows.

A head is trained on states of the target that cost a whole forward pass. They are computed once, in order,
and stored in half precision; samples beyond the limit are computed anew whenever they are needed.

Shape suffixes: T tokens of a sample, W hidden width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretell.attention import Segment, pack
from foretell.models.base import TargetModel
from foretell.train.answers import Advance, Sample
from foretell.train.files import disk_error, replaced
from foretell.types import Needs

_SHARD = 64  # samples in a file
_ROWS = 1024  # of one pass of the target
_LARGEST = 6e4  # what half precision holds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class States:
    """Of one sample, on the CPU.

    Args:
        hidden_TW: last hidden states after the final norm.
        aux_TW: residual streams entering layers.
        best_T: the target's likeliest next token at each position of the answer, -1 in the prompt before.
    """

    hidden_TW: Tensor
    aux_TW: Mapping[int, Tensor]
    best_T: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a file."""
        return {"hidden": self.hidden_TW, "best": self.best_T} | {
            f"aux{layer}": aux_TW for layer, aux_TW in self.aux_TW.items()
        }

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> States:
        """What `tensors` gave."""
        aux_TW = {int(name[3:]): value for name, value in tensors.items() if name.startswith("aux")}
        return States(tensors["hidden"], aux_TW, tensors["best"])


class StateStore:
    """States of samples, from disk where they are kept.

    Args:
        model: the target.
        needs: the states that are wanted.
        samples: all of them; a store goes on being used when samples are added at the end.
        folder: of the shards, whose layers may be more than are needed; None = nothing is kept.
        limit: bytes that the shards may take.
    """

    def __init__(
        self,
        model: TargetModel,
        needs: Needs,
        samples: Sequence[Sample],
        folder: Path | None,
        limit: int,
    ) -> None:
        self._model, self._samples, self._folder, self._limit = model, samples, folder, limit
        self._layers = needs.aux_layers
        self._kept = self._layers if folder is None else _kept_layers(folder, self._layers)
        self._needs = Needs(last_hidden=True, aux_layers=self._kept)

    def fill(self, advance: Advance) -> None:
        """Computes and stores the shards that are missing, as far as the limit allows.

        Raises:
            InputError: the folder cannot be written.
        """
        if self._folder is None:
            return
        count, used = len(self._samples) // _SHARD, 0
        for number in range(count):
            path = self._path(number)
            if not path.exists():
                if used and used * (number + 1) > self._limit * number:
                    self._warn(number)
                    break
                self._write(path, number)
            used += path.stat().st_size
            advance("states", (number + 1) * _SHARD, count * _SHARD)

    def get(self, numbers: Sequence[int]) -> list[States]:
        """Of these samples, in order; float32 on the model's device."""
        found: dict[int, States] = {}
        missing = []
        for number in numbers:
            states = self._stored(number)
            if states is None:
                missing.append(number)
            else:
                found[number] = states
        found |= dict(zip(missing, self._compute([self._samples[i] for i in missing]), strict=True))
        return [self._ready(found[number]) for number in numbers]

    def _ready(self, states: States) -> States:
        device = self._model.device
        aux_TW = {layer: part.to(device, torch.float32) for layer, part in states.aux_TW.items()}
        return States(states.hidden_TW.to(device, torch.float32), aux_TW, states.best_T.to(device).long())

    def _path(self, shard: int) -> Path:
        assert self._folder is not None
        layers = "-".join(map(str, self._kept)) or "last"
        return self._folder / f"states-{layers}-{shard:05d}.safetensors"

    def _warn(self, shard: int) -> None:
        _log.warning(
            "states of %d of %d samples are kept (limit %.1f GB); the others are computed each time",
            shard * _SHARD,
            len(self._samples),
            self._limit / 1e9,
        )

    def _write(self, path: Path, shard: int) -> None:
        part = self._samples[shard * _SHARD : (shard + 1) * _SHARD]
        tensors = {
            f"{place}.{name}": value.contiguous()
            for place, states in enumerate(self._compute(part))
            for name, value in states.tensors().items()
        }
        try:
            with replaced(path) as half:
                save_file(tensors, half)
        except OSError as error:
            raise disk_error(error, path, "the shards so far are kept") from error

    def _stored(self, number: int) -> States | None:
        shard, place = divmod(number, _SHARD)
        if self._folder is None or not (path := self._path(shard)).exists():
            return None
        with safe_open(path, framework="pt") as file:
            names = ["hidden", "best", *(f"aux{layer}" for layer in self._layers)]
            return States.of({name: file.get_tensor(f"{place}.{name}") for name in names})

    def _compute(self, samples: Sequence[Sample]) -> Iterator[States]:
        """In order; several short samples share a pass."""
        group: list[Sample] = []
        for sample in samples:
            if group and sum(len(s.tokens) for s in (*group, sample)) > _ROWS:
                yield from self._pass(group)
                group = []
            group.append(sample)
        if group:
            yield from self._pass(group)

    def _pass(self, samples: Sequence[Sample]) -> Iterator[States]:
        sizes = [len(sample.tokens) for sample in samples]
        arena = self._model.new_arena(sum(sizes))
        segments, start = [], 0
        for sample in samples:
            segments.append(Segment(start, 0, list(sample.tokens), logits=False))
            start += len(sample.tokens)
        output = self._model.forward(pack(segments, arena), self._needs)
        assert output.hidden_TW is not None
        row = 0
        for sample, size in zip(samples, sizes, strict=True):
            rows = slice(row, row + size)
            hidden_TW = output.hidden_TW[rows]
            best_T = torch.full((size,), -1, dtype=torch.int32)
            best_T[sample.prompt - 1 :] = (
                self._model.head(hidden_TW[sample.prompt - 1 :]).argmax(-1).cpu().int()
            )
            aux_TW = {layer: _half(output.aux_TW[layer][rows]) for layer in self._kept}
            yield States(_half(hidden_TW), aux_TW, best_T)
            row += size


def _kept_layers(folder: Path, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Of the shards that are there, those with all of these layers: another head's states serve this one."""
    for path in sorted(folder.glob("states-*-00000.safetensors")):
        kept = tuple(int(part) for part in path.stem.split("-")[1:-1] if part != "last")
        if set(layers) <= set(kept):
            return kept
    return layers


def _half(value_TW: Tensor) -> Tensor:
    """In half precision, where that holds the values."""
    value_TW = value_TW.clone().cpu()
    return value_TW.half() if bool(value_TW.abs().max() < _LARGEST) else value_TW
