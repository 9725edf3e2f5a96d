"""LoRA's adapters of many clients on one frozen encoder: all clients at once against client after client with PEFT.

    python benchmarks/adapters.py --size small
    python benchmarks/adapters.py --size base --clients 100 --device cuda --precision tf32

Needs the extra ``hf``. The encoder has the shape of RoBERTa (``base``: 125 million parameters) and random weights. It
is written to a temporary folder first and loaded from there. The work is one round of FedAvg's client side: every
client starts from the same adapters and head and takes its local steps. ``peft`` is that with PEFT and PyTorch's
optimiser, one client after another, with the attention that Hugging Face chooses; ``loop`` and ``batched`` are the two
engines. Each figure is the median over repeats, taken in turn. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import make_samples, round_of
from measuring import CLOCKS, interleaved

from coterie import models, randomness
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.memory import keep_freed_memory
from coterie.models.problem import Problem
from coterie.rows import matrix_units

# transformers looks for a package `kernels`, and must not find the benchmark of that name beside this file.
sys.path.remove(str(Path(__file__).resolve().parent))

OUTPUTS = 10
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "small": {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "base": {"vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}


def saved_encoder(folder: Path, size: str, dropout: float) -> str:
    """Write an encoder with random weights into a folder."""
    from transformers import RobertaConfig, RobertaModel

    shape = SIZES[size]
    config = RobertaConfig(
        **shape,
        intermediate_size=4 * shape["hidden_size"],
        max_position_embeddings=514,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with randomness.torch_stream(1, "benchmark model"):
        RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return str(folder)


def peft_round(folder: str, rank: int, base: str, samples: Samples, batch: int, device: str) -> Callable[[], None]:
    """Train client after client with PEFT."""
    import peft
    from transformers import AutoModelForSequenceClassification

    with randomness.torch_stream(1, "benchmark model"):
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=OUTPUTS, dtype=getattr(torch, base)
        )
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["query", "value"]
    )
    model = peft.get_peft_model(model, config).to(device).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    start = [value.detach().clone() for value in trained]
    index = samples.splits["train"]
    pad = model.config.pad_token_id
    # What a client ends with, as a server would be sent it.
    ends = [[torch.empty_like(value) for value in trained] for _ in range(samples.clients)]

    def run() -> None:
        for client in range(samples.clients):
            with torch.no_grad():
                for value, first in zip(trained, start, strict=True):
                    value.copy_(first)
            optimiser = torch.optim.SGD(trained, lr=0.05)
            for places in index[client].split(batch):
                x, y = samples.x[places], samples.y[places]
                outputs = model(input_ids=x, attention_mask=(x != pad).long()).logits
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(outputs, y).backward()
                optimiser.step()
            with torch.no_grad():
                for end, value in zip(ends[client], trained, strict=True):
                    end.copy_(value)

    return run


def adapter_rounds(
    size: str, samples: Samples, batch: int, device: str, precision: matrix_units.Precision, rank: int = 8
) -> dict[str, Callable[[], None]]:
    """Give a round of each way, with an encoder in float32."""
    with tempfile.TemporaryDirectory() as folder:
        saved_encoder(Path(folder), size, 0.1)
        problem = _problem(f"hf:{folder},lora={rank},targets=q+v", samples, device)
        rounds = {way: round_of(each, batch) for way, each in _engines(problem, samples, batch, precision).items()}
        return rounds | {"peft": peft_round(folder, rank, "float32", samples, batch, device)}


def _problem(name: str, samples: Samples, device: str) -> Problem:
    with randomness.torch_stream(1, "benchmark model"):
        return Problem.of(models.build(name, tuple(samples.x.shape[1:]), OUTPUTS), device=device)


def _engines(
    problem: Problem, samples: Samples, batch: int, precision: matrix_units.Precision, chunk: int | None = None
) -> dict[str, Engine]:
    batched = BatchedEngine(problem, samples, 1, precision=precision, batch=batch, chunk=chunk)
    return {"loop": LoopEngine(problem, samples, 1), "batched": batched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=sorted(SIZES))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="words of a text")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the encoder")
    parser.add_argument("--base", default="float32", choices=("float32", "bfloat16"), help="type of what is frozen")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=None, help="clients at once; chosen by the engine if not given")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="processor: of one thread on a CPU")
    parser.add_argument("--without", default="", help="ways to leave out, with commas between them")
    args = parser.parse_args()
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    words = SIZES[args.size]["vocab_size"]
    samples = make_samples(args.clients, args.batch * args.steps, args.device, words, args.length)
    with tempfile.TemporaryDirectory() as folder:
        saved_encoder(Path(folder), args.size, args.dropout)
        problem = _problem(f"hf:{folder},lora={args.rank},targets=q+v,base={args.base}", samples, args.device)
        engines = _engines(problem, samples, args.batch, args.precision, args.chunk)
        rounds = {way: round_of(engine, args.batch) for way, engine in engines.items()}
        rounds["peft"] = peft_round(folder, args.rank, args.base, samples, args.batch, args.device)
        rounds = {way: each for way, each in rounds.items() if way not in args.without.split(",")}
    batched = engines["batched"]
    held = sum(value.numel() for value in batched.problem.module.parameters())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.precision}, base in {args.base}")
    print(f"{held / 1e6:.1f} million parameters, {batched.problem.layout.size} of them a client's own")
    print(f"{args.clients} clients of {args.steps} steps of {args.batch} texts of {args.length} words")
    print(batched.choices)
    with matrix_units.rounded(args.precision):
        found = interleaved(rounds, args.repeats, device=args.device, clock=CLOCKS[args.clock])
    for way, each in found.items():
        ratio = each["median"] / found["batched"]["median"]
        print(f"{way:<10}{each['median'] * 1e3:>12.1f} ms{ratio:>8.2f} times batched", flush=True)
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        rounds["batched"]()
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak memory of a batched round {peak:.1f} GiB, all that the other ways hold included")


if __name__ == "__main__":
    main()
