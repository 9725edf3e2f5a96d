"""The samples, held once and gathered by index, and who holds which."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import kernels, randomness
from coterie.compute.class_weights import ClassWeights
from coterie.data import Dataset
from coterie.data.mapped import PagesInUse, is_mapped, mapped_copy
from coterie.data.partitions import Ragged, Shares
from coterie.errors import ConfigError, DataError
from coterie.memory import gpu_memory
from coterie.rows.placement import Keep

Split = Literal["train", "validation", "test"]
Once = Callable[[Hashable, Callable[[], Any]], Any]
"""Makes something that a key decides and that nobody changes, or gives what was made before."""

_FLOAT_LIMIT = 2**28  # bytes: images that fit in this as floats are normalised once, larger sets stay uint8
_DEVICE_PART = 0.5  # of a device's free memory that inputs may take; the rest is for models


@dataclass(frozen=True)
class Samples:
    """All samples of a federation, for one device.

    Parameters
    ----------
    x
        Inputs ``[samples, ...]``: floating-point numbers ready for the model, uint8 to be normalised when gathered, or
        int64 numbers of words, which are left as they are. They lie on the device, on the host if the device has no
        room for them, or in a file that is mapped.
    y
        Targets ``[samples]``.
    scale
        With uint8 inputs, factor of each channel, shaped to broadcast; with ``statistics_of`` one for each client.
    shift
        With uint8 inputs, what is added to each channel.
    splits
        For each split, each client's sample numbers.
    class_counts
        Training samples of each class ``[clients, classes]``.
    noise
        Where noise is redrawn at every access, its standard deviation for each client, else ``None``.
    dtype
        Type of gathered inputs.
    statistics_of
        With uint8 inputs that are scaled by each client's own statistics: the client that each sample belongs to.
    pages
        Of inputs in a file, what is in memory.
    class_weights
        How much a sample of each class counts in training ``[clients, classes]``; ``None`` if all count the same.
    """

    x: Tensor
    y: Tensor
    scale: Tensor
    shift: Tensor
    splits: dict[Split, Ragged]
    class_counts: Tensor
    noise: Tensor | None
    dtype: torch.dtype
    statistics_of: Tensor | None = None
    pages: PagesInUse | None = None
    class_weights: ClassWeights | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        shares: Shares,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        labels: Tensor | None = None,
        own: Sequence[Dataset] = (),
        keep: Keep = "auto",
        scratch: Path | None = None,
        once: Once = lambda key, make: make(),
    ) -> Samples:
        """Put a shared-out data set where a device computes with it.

        ``own`` are, client by client, data sets with its own statistics. ``keep`` says where inputs lie: on the device,
        in the host's memory or in a file in the folder ``scratch``; ``auto`` is the device where it has room, else the
        host, or the file that they came in. ``once`` makes inputs that a key decides and that nobody changes, or gives
        those that were made before.
        """
        is_bytes, words = dataset.x.dtype == torch.uint8, dataset.x.dtype == torch.int64
        if words and shares.noise is not None:
            raise DataError(
                f"data set {dataset.name!r} has integer inputs, to which no noise can be added: use another partition"
            )
        fixed = shares.noise is not None and not shares.redraw_noise
        large = keep == "disk" or dataset.x.numel() * dtype.itemsize > _FLOAT_LIMIT
        stay = words or (is_bytes and not fixed and large)
        place = _place(keep, dataset.x, torch.device(device), dataset.x.dtype if stay else dtype)
        scale, shift = _scaling(dataset, place, dtype)
        statistics_of = None

        def inputs() -> Tensor:
            x = _moved(dataset.x, place)
            if keep in ("device", "host") and is_mapped(x):
                x = x.clone()
            if dataset.fill and not own:
                x = _filled(x, dataset)
            if own or stay:
                return x
            # In place where it is new, which takes a quarter of the time; what is of this type already is the caller's.
            made = x.to(dtype)
            return x * scale + shift if made is x else made.mul_(scale).add_(shift)

        # Runs that differ by how samples are shared out have the same inputs.
        same = "inputs", id(dataset.x), dataset.mean, dataset.std, dataset.fill, place, dtype, keep, stay, not own
        x = inputs() if fixed else once(same, lambda: (dataset.x, inputs()))[1]  # what the key names is held with it
        if own and stay:
            statistics_of = _owner_of_each(len(x), shares, place)
            scale, shift = (
                torch.stack(each) for each in zip(*(_scaling(one, place, dtype) for one in own), strict=True)
            )
        elif own:
            x = _scaled_by_owners(x, shares, own, dtype)
        if fixed and shares.noise is not None:
            _add_fixed_noise(x, shares, seed)
        if keep == "disk" and not is_mapped(x):
            x = mapped_copy(x, scratch or Path(tempfile.gettempdir()))
        targets = (dataset.y if labels is None else labels).to(device)
        if targets.is_floating_point():
            targets = targets.to(dtype)
        splits: dict[Split, Ragged] = {
            "train": _to(shares.train, device),
            "validation": _to(shares.validation, device),
            "test": _to(shares.test, device),
        }
        classes = len(dataset.classes)
        counts = shares.counts(targets.cpu(), classes) if classes else torch.zeros(len(shares.train), 0)
        noise = shares.noise.to(device, dtype) if shares.noise is not None and not fixed else None
        return cls(
            x,
            targets,
            scale.to(device),
            shift.to(device),
            splits,
            counts.to(device=device, dtype=dtype),
            noise,
            dtype,
            None if statistics_of is None else statistics_of.to(device),
            PagesInUse(x) if is_mapped(x) else None,
        )

    @property
    def on_device(self) -> bool:
        """Whether inputs lie on the device, so that gathering them needs nothing of the host."""
        return self.x.device == self.y.device

    @property
    def channels_alike(self) -> bool:
        """Whether all channels of images are one in a GPU's memory, as of grey images that are shown as colours."""
        x = self.x
        one = _is_one_channel(x) and x.dtype == torch.uint8 and self.scale.numel() == 1
        return one and self.dtype == torch.float32 and kernels.compiled_for(x)

    @property
    def clients(self) -> int:
        """How many clients."""
        return len(self.splits["train"])

    def sizes(self, split: Split) -> Tensor:
        """Count the samples of each client in a split."""
        return self.splits[split].sizes

    def flat_index(self, clients: Tensor, split: Split) -> Tensor:
        """Return some clients' sample numbers, client after client."""
        ragged = self.splits[split]
        sizes = ragged.sizes[clients]
        begin = torch.repeat_interleave(ragged.offsets[clients] - sizes.cumsum(0) + sizes, sizes)
        return ragged.flat[begin + torch.arange(len(begin), device=begin.device)]

    def gather(
        self,
        index: Tensor,
        clients: Tensor,
        key: Tensor | None = None,
        into: Tensor | None = None,
        alike: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return samples by number; with ``alike``, channels that are one in memory stay so."""
        flat, alike = index.reshape(-1), alike and self.channels_alike
        source, room = (self.x[:, :1], None) if alike else (self.x, into)
        x = torch.index_select(source, 0, flat.to(self.x.device), out=None if room is None else room[: len(flat)])
        if self.pages is not None:
            self.pages.add(x.numel() * x.element_size())
        # As bytes to the device, and numbers there: bit for bit what numbers from the beginning would be.
        x = x.to(self.y.device)
        if x.dtype == torch.uint8:
            whose = None if self.statistics_of is None else self.statistics_of.index_select(0, flat)
            scale, shift = (each if whose is None else each[whose] for each in (self.scale, self.shift))
            x = x.to(self.dtype).mul_(scale).add_(shift)
        x = x.expand(-1, *self.x.shape[1:]) if alike else x
        x = x.view(*index.shape, *x.shape[1:])
        if self.noise is not None and key is not None:
            drawn = randomness.normal(key, math.prod(x.shape[1:]), self.dtype).view(x.shape)
            x = x + drawn * self.noise[clients].view(-1, *(1,) * (x.dim() - 1))
        return x, self.y.index_select(0, flat).view(index.shape)


def _is_one_channel(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 0


def _moved(x: Tensor, place: torch.device) -> Tensor:
    """Move inputs; channels that are one in memory stay so."""
    return x[:, :1].to(place).expand_as(x) if _is_one_channel(x) else x.to(place)


def _to(ragged: Ragged, device: torch.device | str) -> Ragged:
    return Ragged(ragged.flat.to(device), ragged.offsets.to(device))


def _place(keep: Keep, x: Tensor, device: torch.device, kind: torch.dtype) -> torch.device:
    """Say where inputs lie: by choice, or on the device if they take no more than a part of its free memory."""
    if keep == "device" or device.type == "cpu":
        return device
    if keep in ("host", "disk"):
        return torch.device("cpu")
    free, _ = gpu_memory(device)
    return device if x.numel() * kind.itemsize <= _DEVICE_PART * free else torch.device("cpu")


def _scaling(dataset: Dataset, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give what inputs are multiplied with, and what is added then."""
    dims = (len(dataset.mean), *(1,) * (dataset.x.dim() - 2))
    mean = torch.tensor(dataset.mean, dtype=dtype, device=device).view(dims)
    std = torch.tensor(dataset.std, dtype=dtype, device=device).view(dims)
    return 1 / (255.0 * std if dataset.x.dtype == torch.uint8 else std), -mean / std


def _owner_of_each(count: int, shares: Shares, device: torch.device) -> Tensor:
    """Give the client whose statistics scale each sample."""
    _refuse_shared(shares)
    out = torch.zeros(count, dtype=torch.int64)
    for part in (shares.train, shares.validation, shares.test):
        out[part.flat] = part.clients
    return out.to(device)


def _refuse_shared(shares: Shares) -> None:
    held = torch.cat([part.flat for part in (shares.train, shares.validation, shares.test)])
    if bool((held.bincount() > 1).any()):
        raise ConfigError(
            f"under the partition {shares.scheme!r} clients share samples, which cannot be scaled by each client's own "
            "statistics: use one in which they share none, or data with norm=unit or norm=none"
        )


def _filled(x: Tensor, dataset: Dataset) -> Tensor:
    return torch.where(x.isnan(), torch.tensor(dataset.fill, dtype=x.dtype, device=x.device), x)


def _scaled_by_owners(x: Tensor, shares: Shares, own: Sequence[Dataset], dtype: torch.dtype) -> Tensor:
    """Scale each client's samples by its own statistics."""
    _refuse_shared(shares)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for client, dataset in enumerate(own):
        mine = torch.cat([part[client] for part in (shares.train, shares.validation, shares.test)]).to(x.device)
        scale, shift = _scaling(dataset, x.device, dtype)
        values = _filled(x[mine], dataset) if dataset.fill else x[mine]
        out[mine] = values.to(dtype) * scale + shift
    return out


def _add_fixed_noise(x: Tensor, shares: Shares, seed: int) -> None:
    assert shares.noise is not None
    for client, std in enumerate(shares.noise.tolist()):
        if not std:
            continue
        for ragged in (shares.train, shares.validation, shares.test):
            # Keyed by the sample, in blocks: a client's noise depends on nothing but its samples.
            for index in ragged[client].to(x.device).split(1024):
                key = randomness.keys(seed, "quality noise", 0, index)
                drawn = randomness.normal(key, math.prod(x.shape[1:]), x.dtype)
                x[index] += std * drawn.view(len(index), *x.shape[1:])
