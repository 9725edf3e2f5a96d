"""The only source of random numbers.

Every number is a pure function of ``(seed, purpose, round, client)`` and a counter, so results depend neither on the
order of calls, nor on how clients are chunked, nor on the engine or device. There are two ways to draw:

- :func:`stream` gives a NumPy generator, for what is drawn on the host once (partitions, cohorts, synthetic data);
- :func:`keys` gives one 64-bit key a client, and :func:`bits`, :func:`uniform`, :func:`normal` and
  :func:`permutations` evaluate a counter-based integer hash of those keys for all rows at once on the keys' device.
  Integers are equal on every device; so are uniforms; normals are equal to rounding.

The hash is the finaliser of SplitMix64 applied to a Weyl sequence (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), in wrapping 64-bit arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import random  # noqa: TID251
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from coterie import kernels

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_SECRET_BLOCK = 2**20  # numbers that are drawn from one hash


def _digest(*parts: object) -> bytes:
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"coterie").digest()


def stream(seed: int, purpose: str, round_number: int = 0, client: int = 0) -> np.random.Generator:
    """Return the host generator of one purpose.

    Parameters
    ----------
    seed
        The experiment's seed.
    purpose
        What the numbers are for; different purposes never share a number.
    round_number
        The round they belong to, 0 for what is drawn once.
    client
        The client they belong to, 0 for what is common to all.

    Returns
    -------
    numpy.random.Generator
        A generator that depends on these four values alone.

    Examples
    --------
    >>> int(stream(1, "cohort", 3).integers(100)) == int(stream(1, "cohort", 3).integers(100))
    True
    """
    words = np.frombuffer(_digest(int(seed), purpose, int(round_number), int(client)), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


@contextlib.contextmanager
def torch_stream(seed: int, purpose: str) -> Iterator[None]:
    """Make all that draws from global generators draw from a stream, and leave the CPU's generators as they were.

    ``torch.nn`` initialisers draw from PyTorch's; what makes a model of the user's may draw from NumPy's and Python's.

    Parameters
    ----------
    seed
        The experiment's seed.
    purpose
        What the numbers are for.

    Yields
    ------
    None
        While the context is open, the generators of PyTorch, NumPy and Python are those of the stream.
    """
    state, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        # Not torch.manual_seed, for which some versions of PyTorch load their compiler: a second and a half.
        number = int.from_bytes(_digest(int(seed), purpose)[:7], "big")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002, TID251
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)  # noqa: TID251
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002, TID251


HostKeys: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""Keys, or clients' numbers, on the host."""

Keys = TypeVar("Keys", Tensor, HostKeys)
"""Keys as a tensor, or on the host as a NumPy array, whose operations are several times faster for a few keys."""


def generator_states(device: torch.device) -> tuple[str, str]:
    """Give the states of the global generators that code of the user's may draw from, to tell whether it did.

    Parameters
    ----------
    device
        Whose generator is looked at beside those of the CPU, of Python and of NumPy.

    Returns
    -------
    tuple[str, str]
        The digest of PyTorch's, and that of Python's and NumPy's.
    """
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    numpys: Any = np.random.get_state()  # noqa: NPY002
    tensors = [each.cpu().numpy().tobytes() for each in (torch.get_rng_state(), *on_device)]
    return _digest(*tensors).hex(), _digest(random.getstate(), numpys[1].tobytes(), numpys[2:]).hex()


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the global generators of PyTorch, Python and NumPy as they were.

    Parameters
    ----------
    device
        Whose generator is kept beside those of the CPU, of Python and of NumPy.

    Yields
    ------
    None
        While whatever draws from them may run.
    """
    pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002, TID251


def _mix(value: Keys) -> Keys:
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


def keys(seed: int, purpose: str, round_number: int, clients: Tensor) -> Tensor:
    """Return one key a client.

    Parameters
    ----------
    seed
        The experiment's seed.
    purpose
        What the numbers are for.
    round_number
        The round they belong to.
    clients
        The clients' numbers, an integer tensor.

    Returns
    -------
    Tensor
        64-bit keys, of the shape and on the device of ``clients``.
    """
    base = stream_base(seed, purpose, round_number)
    if clients.device.type != "cpu":
        return _mix(_mix(clients.to(torch.int64) * GOLDEN + base) + base)
    with np.errstate(over="ignore"):  # NumPy warns when a single number wraps, though not when an array does
        made = keys_of(base, clients.to(torch.int64).numpy())
        return torch.as_tensor(made, device="cpu")  # said, or else a caller's default device takes them


@functools.lru_cache(maxsize=4096)
def stream_base(seed: int, purpose: str, round_number: int) -> int:
    """Return the number from which :func:`keys` makes the keys of one purpose and round.

    Parameters
    ----------
    seed
        The experiment's seed.
    purpose
        What the numbers are for.
    round_number
        The round they belong to.

    Returns
    -------
    int
        A number of 64 bits.
    """
    return int.from_bytes(_digest(int(seed), purpose, int(round_number))[:8], "big", signed=True)


def keys_of(base: int | HostKeys, clients: HostKeys) -> HostKeys:
    """Return one key a client on the host.

    Parameters
    ----------
    base
        The :func:`stream_base` of all of them, or of each.
    clients
        The clients' numbers.

    Returns
    -------
    numpy.ndarray
        64-bit keys, those of :func:`keys`.
    """
    return _mix(_mix(clients * GOLDEN + base) + base)


def fold_in(key: Keys, number: int | Keys) -> Keys:
    """Derive new keys from ``key``, one for each ``number``.

    Parameters
    ----------
    key
        Keys to derive from.
    number
        An integer, or as many as broadcast against ``key``.

    Returns
    -------
    Keys
        Keys that share nothing with ``key`` or with those of other numbers.
    """
    if isinstance(key, Tensor) and _in_one_pass(key, number):
        from coterie.kernels.hashing import fold_in as folded

        return folded(key, number, (GOLDEN, MIX_1, MIX_2))
    counter = _wrap(number * GOLDEN) if isinstance(number, int) else number * GOLDEN
    return _mix(_mix(key + counter) ^ MIX_1)


def _in_one_pass(key: Tensor, number: int | Tensor) -> bool:
    """Return whether there is a kernel for these keys and numbers."""
    if key.dim() != 1 or not kernels.compiled_for(key):
        return False
    return isinstance(number, int) or (number.dim() == 1 and len(number) in (1, len(key)))


def _wrap(value: int) -> int:
    # Python's integers do not wrap: bring the product into the range of int64 before it meets a tensor.
    return (value + 2**63) % 2**64 - 2**63


def bits(key: Tensor, count: int) -> Tensor:
    """Return ``count`` 64-bit integers for each key.

    Parameters
    ----------
    key
        Keys, of any shape.
    count
        How many for each.

    Returns
    -------
    Tensor
        Of shape ``(*key.shape, count)``.
    """
    counter = torch.arange(1, count + 1, device=key.device, dtype=torch.int64) * GOLDEN
    return _mix(key.unsqueeze(-1) + counter)


def lanes(key: Tensor, count: int) -> Tensor:
    """Return ``count`` 16-bit integers for each key, four from each hash: enough for a mask, at a quarter of the cost.

    Parameters
    ----------
    key
        Keys, of any shape.
    count
        How many for each.

    Returns
    -------
    Tensor
        ``torch.int16`` of shape ``(*key.shape, count)``, uniform over all its values.
    """
    drawn = bits(key, -(-count // 4))
    try:
        return drawn.view(torch.int16)[..., :count]
    except RuntimeError:  # older versions of PyTorch cannot do that under vmap: the same integers by shifts
        each = torch.stack([(drawn << left) >> 48 for left in (48, 32, 16, 0)], -1)
        return each.flatten(-2)[..., :count].to(torch.int16)


def uniform(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``count`` numbers in [0, 1) for each key, exact multiples of 2⁻²⁴ (float32) or 2⁻⁵³ (float64).

    Parameters
    ----------
    key
        Keys, of any shape.
    count
        How many for each.
    dtype
        ``torch.float32`` or ``torch.float64``.

    Returns
    -------
    Tensor
        Of shape ``(*key.shape, count)``.
    """
    digits = 24 if dtype == torch.float32 else 53
    raw = (bits(key, count) >> (64 - digits)) & ((1 << digits) - 1)
    return raw.to(dtype) * 2.0**-digits


def normal(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``count`` standard normal numbers for each key (Box and Muller).

    Parameters
    ----------
    key
        Keys, of any shape.
    count
        How many for each.
    dtype
        The numbers' type; they are computed in float64.

    Returns
    -------
    Tensor
        Of shape ``(*key.shape, count)``.
    """
    both = uniform(key, 2 * count)
    # 1 − u lies in (0, 1], so that the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log1p(-both[..., :count]))
    return (radius * torch.cos(2.0 * math.pi * both[..., count:])).to(dtype)


def permutations(key: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Shuffle ``0 .. lengths[r]-1`` for each row, by sorting hashed keys.

    Parameters
    ----------
    key
        Keys of shape ``[rows]``.
    lengths
        How many numbers each row shuffles, shape ``[rows]``.
    width
        Columns of the answer, at least the largest length.

    Returns
    -------
    Tensor
        Integers of shape ``[rows, width]``: a permutation in the first ``lengths[r]`` places of row ``r``, then the
        padding places in order. A row does not depend on ``width`` nor on the other rows.
    """
    hashed = bits(key, width)
    padding = torch.arange(width, device=key.device) >= lengths.unsqueeze(-1)
    # The largest integer puts padding last; the sort is stable, so that padding stays in order.
    hashed = hashed.masked_fill(padding, torch.iinfo(torch.int64).max)
    return torch.argsort(hashed, dim=-1, stable=True)


def secret_normal(key: bytes, count: int) -> Tensor:
    """Return standard normal numbers that nobody can predict without the key, for noise that protects privacy.

    The hash behind :func:`normal` is fast but easily inverted. These numbers come from SHAKE-256, which is not.

    Parameters
    ----------
    key
        A secret, together with what the numbers are for. The same key gives the same numbers.
    count
        How many.

    Returns
    -------
    Tensor
        In float64, of shape ``[count]``.
    """
    pieces = []
    for begin in range(0, count, _SECRET_BLOCK):
        size = min(_SECRET_BLOCK, count - begin)
        drawn = hashlib.shake_256(begin.to_bytes(8, "little") + key).digest(16 * size)
        both = (np.frombuffer(drawn, dtype="<u8") >> 11) * 2.0**-53
        pieces.append(np.sqrt(-2.0 * np.log1p(-both[:size])) * np.cos(2.0 * math.pi * both[size:]))
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0))
