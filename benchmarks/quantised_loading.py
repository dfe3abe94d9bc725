"""What loading a quantised model takes of the host's memory: three routes, each in its own process, on the CPU.

A random model of Llama's shape with 1.1 billion weights (TinyLlama's numbers) is written to a temporary folder, 16-bit,
in shards of 500 MB, and again quantised by `lowmem quantize`. Then it is loaded

- by lowmem, quantised while it is read one weight at a time;
- by `AutoModelForCausalLM.from_pretrained(quantization_config=...)`;
- by lowmem, from the quantised weights.

Peak RSS is the most resident memory while the model is loaded, above that of the same process right before (everything
imported). Pages of mapped files are part of it while they are mapped; so is the model itself, which on a CPU stays in
the same memory. "Beside the model" is the peak less the bytes of the finished model.

Bar: beside the model, lowmem takes at most one shard and one 16-bit layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, as_table, environment, table

RESULT = RESULTS / "quantised_loading"
MIB = 2**20
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHARD_BYTES = 500_000_000
ROUTES = {
    "one": "lowmem, quantising one weight at a time",
    "transformers": "from_pretrained(quantization_config=...)",
    "stored": "lowmem, from quantised weights",
}


def write_model(folder: Path, layers: int) -> dict[str, int]:
    """The base model, tensor by tensor; its bytes, and those of one layer."""
    from transformers import LlamaConfig

    from lowmem.loading import model_without_data
    from lowmem.shards import ShardWriter

    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, dtype=torch.bfloat16)
    config.architectures = ["LlamaForCausalLM"]
    shapes = {name: t.shape for name, t in model_without_data(config).state_dict().items()}
    folder.mkdir()
    writer = ShardWriter(folder, list(shapes), SHARD_BYTES)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add(name, (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16))
    writer.close()
    config.save_pretrained(folder)
    layer = sum(shape.numel() * 2 for name, shape in shapes.items() if ".layers.0." in name)
    return {"model_bytes": writer.total_bytes, "layer_bytes": layer, "weights": writer.total_bytes // 2}


def load(route: str, folder: Path) -> dict[str, Any]:
    """One route, in this process."""
    from transformers import AutoModelForCausalLM

    from lowmem import Quantization, TrainingConfig
    from lowmem.config import LoadConfig, ModelConfig
    from lowmem.libraries import import_bitsandbytes
    from lowmem.loading import load_model
    from lowmem.one_by_one import load_one_by_one  # noqa: F401 - imported before the start is measured
    from lowmem.run import Run

    import_bitsandbytes()
    model = ModelConfig(str(folder))
    asked = Quantization().configure(
        LoadConfig.of(model, torch.device("cpu")), Run(TrainingConfig(), torch.device("cpu"), frozenset())
    )
    _warm_up(asked)
    start = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    begin = time.perf_counter()
    if route == "transformers":
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map={"": "cpu"}, **asked.from_pretrained
        )
    else:
        loaded = load_model(asked)
    seconds = time.perf_counter() - begin
    peak, after = resident("VmHWM") - start, resident("VmRSS") - start
    return {"peak": peak, "after": after, "seconds": seconds, "held": held_bytes(loaded)}


def _warm_up(asked: Any) -> None:
    """Import what a first load imports, by a model that takes no memory to speak of."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1))
    with tempfile.TemporaryDirectory() as folder:
        tiny.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, **asked.from_pretrained)


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights, scales and buffers."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(storages.values())


def resident(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def in_a_process(route: str, folder: Path) -> dict[str, Any]:
    """One route, in a process of its own."""
    command = [sys.executable, __file__, "--route", route, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, nothing is written")
    parser.add_argument("--route", choices=ROUTES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.route:
        print(json.dumps(load(options.route, options.folder)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        base, stored = Path(temporary, "base"), Path(temporary, "nf4")
        sizes = write_model(base, 2 if options.quick else SHAPE["num_hidden_layers"])
        command = [sys.executable, "-m", "lowmem", "quantize", str(base), str(stored), "--json"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        found = {route: in_a_process(route, stored if route == "stored" else base) for route in ROUTES}
    rows = [
        [
            ROUTES[route],
            *(f"{numbers[key] / MIB:,.0f}" for key in ("peak", "held")),
            f"{(numbers['peak'] - numbers['held']) / MIB:,.0f}",
            f"{numbers['seconds']:.1f}",
        ]
        for route, numbers in found.items()
    ]
    header = ["route", "peak RSS above start, MiB", "of it the model, MiB", "beside the model, MiB", "seconds"]
    bound = SHARD_BYTES + sizes["layer_bytes"]
    worst = max(found[route]["peak"] - found[route]["held"] for route in ("one", "stored"))
    words = (
        f"{sizes['weights']:,} weights, {sizes['model_bytes'] / MIB:,.0f} MiB in 16 bits; one shard and one 16-bit "
        f"layer: {bound / MIB:,.0f} MiB; lowmem, beside the model: {worst / MIB:,.0f} MiB"
    )
    facts = environment()
    text = "\n\n".join(["# Loading a quantised model", as_table(facts), words, table(header, rows)]) + "\n"
    print(text)
    if not options.quick:
        RESULT.with_suffix(".md").write_text(text, encoding="utf-8")
        record = {"environment": facts, **sizes, "shard_bytes": SHARD_BYTES, "routes": found}
        RESULT.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
