"""How the batched engine applies models to samples: blocks of clients, padded to the longest of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.compute._cache import BoundedCache, Identity
from coterie.compute.engine import Predict, take
from coterie.compute.nets.row_net import RowNet
from coterie.compute.samples import Samples, Split
from coterie.compute.strips import strips
from coterie.rows import Rows
from coterie.rows.host_copies import on_host

CACHED_CLIENTS = 8
"""Sets of clients whose sample numbers are kept. A run evaluates the same few sets after every round."""

_BLOCK_ELEMENTS = 2**24  # numbers of the inputs in one block, 64 MB in float32
_SHARED_SAMPLES = 4096  # samples in one block of a model that all clients share
_DEFAULT_CHUNK = 128  # rows in one block where the engine has no chunk of its own


@dataclass(frozen=True)
class _PaddedBlock:
    """The samples of some clients, split after split, each padded to its longest client."""

    index: Tensor  # sample numbers [clients, places]
    real: tuple[Tensor, ...]  # for each split, which places of the flattened block are samples and not padding


class BatchedPrediction:
    """Applies the models of many clients to their own samples.

    Parameters
    ----------
    samples
        The federation's samples.
    sizes
        Samples of each client by split, on the device.
    host_sizes
        The same on the host.
    most
        Samples at once; ``None`` where the size of the inputs decides alone.
    """

    def __init__(
        self,
        samples: Samples,
        sizes: dict[Split, Tensor],
        host_sizes: dict[Split, Tensor],
        most: int | None = None,
    ) -> None:
        self._samples, self._sizes, self._host_sizes = samples, sizes, host_sizes
        self._elements = min(_BLOCK_ELEMENTS, (most or _BLOCK_ELEMENTS) * samples.x[0].numel())
        # Clients are told apart by the tensor that holds them: to look at their numbers would wait for the device.
        self.blocks: BoundedCache[tuple[tuple[Split, ...], Identity], _PaddedBlock] = BoundedCache(CACHED_CLIENTS)
        self.flat: BoundedCache[tuple[tuple[Split, ...], Identity], list[Tensor]] = BoundedCache(CACHED_CLIENTS)

    def of_clients(
        self, predict: Predict, net: RowNet, rows: Rows, clients: Tensor, splits: tuple[Split, ...], chunk: int | None
    ) -> list[Tensor | None]:
        """Apply each client's model to its samples; ``None`` for a split in which no client has any."""
        chunk = chunk or _DEFAULT_CHUNK
        if len(clients) <= chunk and (block := self._block(clients, splits)) is not None:
            # All splits in one pass, so that the weights are read once.
            x, _ = self._samples.gather(block.index, clients, alike=net.reads_channels_once)
            outputs = predict(net, rows, x).flatten(0, 1)
            return [outputs.index_select(0, real) for real in block.real]
        return [self._in_chunks(predict, net, rows, clients, split, chunk) for split in splits]

    def of_one_model(
        self, predict: Predict, net: RowNet, rows: Rows, clients: Tensor, splits: tuple[Split, ...]
    ) -> list[Tensor]:
        """Apply one model, without a client axis, to the samples of all clients as if they were one client's."""
        parts = self._flat_index(clients, splits)
        model = {name: value.unsqueeze(0) for name, value in rows.items()}
        block = max(1, self._elements // max(1, self._samples.x[0].numel()))
        pieces = []
        for part in torch.cat(parts).split(min(block, _SHARED_SAMPLES)):
            x, _ = self._samples.gather(part.unsqueeze(0), clients[:1], alike=net.reads_channels_once)
            pieces.append(predict(net, model, x)[0])
        outputs = torch.cat(pieces)
        return list(outputs.split([len(part) for part in parts]))

    def _flat_index(self, clients: Tensor, splits: tuple[Split, ...]) -> list[Tensor]:
        """Return the sample numbers of each split, client after client; made once for the same clients."""
        key = splits, Identity(clients)
        if key not in self.flat:
            self.flat[key] = [self._samples.flat_index(clients, split) for split in splits]
        return self.flat[key]

    def _in_chunks(
        self, predict: Predict, net: RowNet, rows: Rows, clients: Tensor, split: Split, chunk: int
    ) -> Tensor | None:
        sizes = self._sizes[split][clients]
        starts = sizes.cumsum(0) - sizes
        out: Tensor | None = None
        # Clients of similar size share a block, so that little of it is padding. Where one block holds all clients they
        # stay in their order, and the models are not copied.
        host = self._host_sizes[split][on_host(clients)].numpy()
        pieces = strips(host, self._samples.x[0].numel(), chunk)
        together = len(pieces) == 1
        for piece in pieces:
            longest, places = int(host[piece].max()), torch.from_numpy(piece).to(clients.device)
            if longest == 0:
                break
            step = max(1, min(longest, self._elements // max(1, len(places) * self._samples.x[0].numel())))
            model = rows if together else take(rows, places)
            for begin in range(0, longest, step):
                place = torch.arange(begin, min(begin + step, longest), device=clients.device)
                real = place < sizes[places].unsqueeze(1)
                index, within = self._padded(clients[places], split, sizes[places].unsqueeze(1), place)
                x, _ = self._samples.gather(index, clients[places], alike=net.reads_channels_once)
                outputs = predict(net, model, x)
                if out is None:
                    out = outputs.new_empty(int(sizes.sum()), *outputs.shape[2:])
                out[(starts[places].unsqueeze(1) + within)[real]] = outputs[real]
        return out

    def _padded(self, clients: Tensor, split: Split, sizes: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at some places of each client, and those places; padding repeats the last sample."""
        ragged = self._samples.splits[split]
        within = torch.minimum(place.expand(len(clients), -1), (sizes - 1).clamp_min(0))
        flat = (ragged.offsets[clients].unsqueeze(1) + within).clamp_max(max(0, len(ragged.flat) - 1))
        return ragged.flat[flat], within

    def _block(self, clients: Tensor, splits: tuple[Split, ...]) -> _PaddedBlock | None:
        """Return the block of some clients, made once for the same clients; ``None`` if it would be too large."""
        key = splits, Identity(clients)
        if (known := self.blocks.get(key)) is not None:
            return known
        host = clients.cpu()
        sizes = [self._host_sizes[split][host] for split in splits]
        longest = [int(each.max()) for each in sizes]
        width = sum(longest)
        if not width or len(clients) * width * self._samples.x[0].numel() > self._elements:
            return None
        index, real, begin = [], [], 0
        for split, each, most in zip(splits, sizes, longest, strict=True):
            size, place = each.to(clients.device).unsqueeze(1), torch.arange(most, device=clients.device)
            index.append(self._padded(clients, split, size, place)[0])
            row, column = (place < size).nonzero(as_tuple=True)
            real.append(row * width + begin + column)
            begin += most
        self.blocks[key] = _PaddedBlock(torch.cat(index, 1), tuple(real))
        return self.blocks[key]
