"""lowmem and TRL at the same LoRA job: real tokens a second, peak bytes, and the loss they end with.

Equal on both sides: weights and their dtype, adapters (r 16 on all linear layers of the decoder, filled alike), rows,
rows per micro-batch and per optimizer step, supervised tokens (counted on both sides), learning rate, schedule, weight
decay, clipping, optimizer steps, gradient checkpointing on, and mixed precision on or off. Every job runs in a process
of its own, the contestants take turns, and every second round runs in reverse order.

Table A meets TRL's defaults. Table B meets the best settings of TRL that `--search` found: they stand below as
TRL_FASTEST and TRL_SMALLEST, and are given the very micro-batches that lowmem forms (rows of like length together).

    python benchmarks/versus_trl.py --quick     # a tiny random model, 3 steps: does it run?
    python benchmarks/versus_trl.py --search    # candidates for the best settings of both sides
    python benchmarks/versus_trl.py             # the tables
    python benchmarks/versus_trl.py --report    # the tables again from the jobs that are done

Jobs that are done are kept in benchmarks/out/versus_trl and not run again while settings, code and versions stay, so an
interrupted run goes on where it stopped (--fresh forgets them). Needs `pip install 'lowmem[benchmark]'`. Writes
benchmarks/results/versus_trl.md and .json. Exit status 1 where a bar is missed, 2 where the two did not do the same
job.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from environment import HERE, RESULTS, as_table, environment, table
from uneven_rows import make_rows, write_rows

WORK = HERE / "out" / "versus_trl"
LOSS_TOLERANCE = 0.01
SPEED_BAR, MEMORY_BAR = 1.0, 0.70  # against table B; the aims are 1.3 and 0.40

# -- settings that are not equal --------------------------------------------------------------------------------------

# Keys of TRL's side: `sorted_rows` hands it rows of like length together, `attention` is the model's
# attn_implementation, everything else goes to SFTConfig as it stands.
TRL_DEFAULTS: dict[str, Any] = {}
TRL_FASTEST: dict[str, Any] = {
    "sorted_rows": True,
    "padding_free": True,
    "max_length": None,
    "attention": "eager",
}
TRL_SMALLEST: dict[str, Any] = TRL_FASTEST
TRL_CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": TRL_DEFAULTS,
    "sorted rows": {"sorted_rows": True},
    "padding free": {"padding_free": True, "max_length": None},
    "padding free, sorted": {"sorted_rows": True, "padding_free": True, "max_length": None},
    "padding free, sorted, eager": {
        "sorted_rows": True,
        "padding_free": True,
        "max_length": None,
        "attention": "eager",
    },
    "float32": {"sorted_rows": True, "bf16": False},
    "eager attention": {"sorted_rows": True, "attention": "eager"},
    "reentrant checkpointing": {"sorted_rows": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "selective checkpointing": {"sorted_rows": True, "gradient_checkpointing_kwargs": {"selective": True}},
    "group by length": {"train_sampling_strategy": "group_by_length"},
    "one loader process": {"sorted_rows": True, "dataloader_num_workers": 1},
    "unfused AdamW": {"sorted_rows": True, "optim": "adamw_torch"},
}
# Not among them: packing (it changes the rows of a micro-batch), Liger (Triton only; deprecated in TRL 1.16), kernels
# from the hub, torch.compile. TRL 1.16 computes its loss in chunks of the vocabulary whatever the settings.

# Keys of lowmem's side: `attention` as above, `chunk_size` of ChunkedCrossEntropy.
LOWMEM: dict[str, Any] = {"attention": "eager"}
LOWMEM_CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks of 80": {"chunk_size": 80},
    "eager attention": {"attention": "eager"},
    "chunks of 80, eager": {"chunk_size": 80, "attention": "eager"},
}


@dataclass(frozen=True)
class Common:
    """What both sides are given alike.

    Attributes:
        model: folder of weights and tokenizer.
        rows: JSON file of token ids and labels; the rows after the last step's measure the loss at the end.
        steps: optimizer steps.
        warm_up: first steps that are not timed.
        memory_steps: optimizer steps of the run that counts bytes.
        dtype: of the frozen weights.
    """

    model: str
    rows: str
    steps: int = 12
    warm_up: int = 2
    memory_steps: int = 2
    rows_per_step: int = 16
    rows_per_micro_batch: int = 4
    max_length: int = 512
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    lr_scheduler_type: str = "linear"
    rank: int = 16
    lora_alpha: int = 32
    dtype: str = "bfloat16"
    logging_steps: int = 4
    rows_at_the_end: int = 16
    threads: int | None = None


# -- one job, in its own process --------------------------------------------------------------------------------------


def run_job(spec: dict[str, Any]) -> dict[str, Any]:
    """Train as the spec says, and measure."""
    import torch

    common = Common(**spec["common"])
    if common.threads:
        torch.set_num_threads(common.threads)
    steps = common.memory_steps if spec["memory"] else common.steps
    rows = json.loads(Path(common.rows).read_text(encoding="utf-8"))
    used, left = rows[: steps * common.rows_per_step], rows[common.steps * common.rows_per_step :]
    side: Callable[..., Any] = {"lowmem": _lowmem, "trl": _trl}[spec["side"]]
    marks: list[tuple[float, float]] = []  # wall and processor seconds after each optimizer step
    model, train, counts = side(common, spec["settings"], steps, used, marks)
    weights = [*model.parameters(), *model.buffers()]
    from live_bytes import LiveBytes, bytes_of

    result = {"weight_bytes": bytes_of(weights), "trainable": _fill_adapters(model)}
    if spec["memory"]:
        with LiveBytes(weights) as live:
            train()
        result |= {"peak_live_bytes": live.peak, "peak_operation": live.peak_operation}
        result["peak_above_weights"] = live.peak - result["weight_bytes"]
    else:
        _reset_peak_rss()
        result["rss_before"] = _status("VmRSS")
        train()
        result |= {"peak_rss": _status("VmHWM"), "loss_after": _loss(model, left[: common.rows_at_the_end])}
        timed = used[common.warm_up * common.rows_per_step :]
        real = sum(len(row["input_ids"]) for row in timed)
        start, end = marks[common.warm_up - 1], marks[-1]
        result |= {"seconds": end[0] - start[0], "processor_seconds": end[1] - start[1]}
        result["tokens_per_second"] = real / result["seconds"]
        result["seconds_per_step"] = [round(b[0] - a[0], 3) for a, b in pairwise(marks)]
    return {**result, **counts(), "environment": environment()}


def _lowmem(common: Common, settings: dict[str, Any], steps: int, rows: list[Any], marks: list[Any]) -> Any:
    import lowmem as lm

    settings = dict(settings)
    losses: list[float] = []

    def observe(event: Any) -> None:
        if event.kind == "step":
            marks.append((time.perf_counter(), time.process_time()))
        elif event.kind == "log":
            losses.append(event.metrics["loss"])

    trainer = lm.Trainer(
        model=_load(common, settings.pop("attention", None)),
        train_dataset=rows,
        training=lm.TrainingConfig(
            batch_size=common.rows_per_step,
            learning_rate=common.learning_rate,
            lr_scheduler_type=common.lr_scheduler_type,  # type: ignore[arg-type]
            weight_decay=common.weight_decay,
            max_grad_norm=common.max_grad_norm,
            max_length=common.max_length,
            max_steps=steps,
            logging_steps=common.logging_steps,
            shuffle=False,
        ),
        strategies=[
            lm.LoRA(r=common.rank, lora_alpha=common.lora_alpha),
            lm.GradientCheckpointing(),
            lm.GradientAccumulation(micro_batch_size=common.rows_per_micro_batch),
            lm.ChunkedCrossEntropy(chunk_size=settings.pop("chunk_size", None)),
            *([lm.MixedPrecision()] if settings.pop("bf16", True) else []),
            *([lm.ChunkedLayers()] if settings.pop("chunked_layers", False) else []),
        ],
        observers=[observe],
    )
    assert not settings, f"unknown settings of lowmem's side: {settings}"

    def counts() -> dict[str, Any]:
        return {"tokens": trainer.tokens, "supervised_tokens": trainer.supervised_tokens, "train_losses": losses}

    return trainer.model, trainer.train, counts


def _trl(common: Common, settings: dict[str, Any], steps: int, rows: list[Any], marks: list[Any]) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    settings = dict(settings)
    if settings.pop("sorted_rows", False):
        rows = _like_lengths_together(rows, common.rows_per_step)
    model = _load(common, settings.pop("attention", None))
    seen = {"tokens": 0, "supervised_tokens": 0}

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            real = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
            seen["tokens"] += int(real)
            seen["supervised_tokens"] += int((inputs["labels"][:, 1:] != -100).sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    equal: dict[str, Any] = {
        "output_dir": str(WORK / "trl"),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": common.rows_per_micro_batch,
        "gradient_accumulation_steps": common.rows_per_step // common.rows_per_micro_batch,
        "gradient_checkpointing": True,
        "max_steps": steps,
        "learning_rate": common.learning_rate,
        "lr_scheduler_type": common.lr_scheduler_type,
        "weight_decay": common.weight_decay,
        "max_grad_norm": common.max_grad_norm,
        "max_length": common.max_length,
        "logging_steps": common.logging_steps,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Counting(
        model=model,
        args=SFTConfig(**(equal | settings)),
        train_dataset=Dataset.from_list([{k: row[k] for k in ("input_ids", "labels")} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(common.model),
        peft_config=LoraConfig(
            r=common.rank,
            lora_alpha=common.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[Marks()],
    )

    def counts() -> dict[str, Any]:
        return {**seen, "train_losses": [line["loss"] for line in trainer.state.log_history if "loss" in line]}

    return trainer.model, trainer.train, counts


def _load(common: Common, attention: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    more = {"attn_implementation": attention} if attention else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(common.model, dtype=getattr(torch, common.dtype), **more)
    return model.to(device)


def _like_lengths_together(rows: list[Any], rows_per_step: int) -> list[Any]:
    """The order in which lowmem's accumulation takes the rows of a step."""
    steps = [rows[i : i + rows_per_step] for i in range(0, len(rows), rows_per_step)]
    return [row for step in steps for row in sorted(step, key=lambda r: -len(r["input_ids"]))]


def _fill_adapters(model: Any) -> dict[str, Any]:
    """The same adapters on both sides; what they are called and hold goes into the result, and is compared."""
    import torch

    generator = torch.Generator().manual_seed(1)
    named = sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)
    for name, parameter in named:
        values = torch.randn(parameter.shape, generator=generator) * (0.02 if "lora_A" in name else 0.001)
        parameter.data.copy_(values)
    names = hashlib.sha256("\n".join(n for n, _ in named).encode()).hexdigest()[:12]
    return {"parameters": sum(p.numel() for _, p in named), "dtype": str(named[0][1].dtype), "names": names}


def _loss(model: Any, rows: list[Any]) -> float:
    """Mean loss per supervised token of rows nobody trained on, by the plain definition, row by row."""
    import torch
    import torch.nn.functional as F

    model.eval()
    total, number = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=model.device)
        labels = torch.tensor(row["labels"][1:], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        number += int((labels != -100).sum())
    return total / number


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes (VmRSS: resident now, VmHWM: most so far)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _reset_peak_rss() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# -- model and rows ---------------------------------------------------------------------------------------------------


def prepare(arguments: argparse.Namespace) -> Common:
    """Weights and token ids on disk, once, so that every job reads the same."""
    folder = arguments.work
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / ("model-quick" if arguments.quick else f"model-{_short(arguments.model)}-{arguments.dtype}")
    if not (model / "config.json").exists():
        partial = folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        (_tiny_model if arguments.quick else _real_model)(arguments, partial)
        partial.rename(model)
    common = Common(model=str(model), rows="", dtype=arguments.dtype, threads=arguments.threads)
    if arguments.quick:
        common = replace(common, steps=3, warm_up=1, memory_steps=2, rows_per_step=4, rows_per_micro_batch=2)
        common = replace(common, rows_at_the_end=2, logging_steps=1)
    if arguments.steps:
        common = replace(common, steps=arguments.steps)
    return replace(common, rows=str(_rows(arguments, common)))


def _real_model(arguments: argparse.Namespace, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from lowmem.config import LoadConfig, ModelConfig
    from lowmem.loading import load_model, load_model_config, load_tokenizer

    named = ModelConfig(arguments.model, dtype=arguments.dtype)
    loaded = load_model(LoadConfig.of(named, "cpu"))
    # A model read from a GGUF file does not save itself in transformers' format, though its weights are plain by now.
    config = load_model_config(named)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.to(getattr(torch, arguments.dtype)).save_pretrained(folder)
    load_tokenizer(named).save_pretrained(folder)


def _tiny_model(arguments: argparse.Namespace, folder: Path) -> None:
    """A random Llama of a few thousand weights, and a tokenizer that knows the words of the made-up rows."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    splitter = pre_tokenizers.Whitespace()
    texts = [row["prompt"] + row["completion"] for row in make_rows(300)]
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>", model_max_length=512
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).save_pretrained(folder)
    fast.save_pretrained(folder)


def _rows(arguments: argparse.Namespace, common: Common) -> Path:
    """Token ids and labels of all rows that are needed, in one JSON file."""
    from transformers import AutoTokenizer

    from lowmem.config import DataConfig
    from lowmem.data import tokenize

    needed = common.steps * common.rows_per_step + common.rows_at_the_end
    source = Path(arguments.data) if arguments.data else write_rows(arguments.work / f"rows-{needed}.jsonl", needed)
    place = Path(arguments.work) / f"tokens-{Path(common.model).name}-{_short(str(source))}-{needed}.json"
    if not place.exists():
        tokenizer = AutoTokenizer.from_pretrained(common.model)
        data = DataConfig(train_on="completions")
        rows = tokenize(str(source), tokenizer, data, common.max_length)
        if len(rows) < needed:
            raise SystemExit(f"{source}: {len(rows)} usable rows, {needed} needed; lower --steps")
        plain = [{key: row[key].tolist() for key in ("input_ids", "labels")} for row in rows[:needed]]
        place.write_text(json.dumps(plain), encoding="utf-8")
    return place


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8] if "/" in text else text


def describe(common: Common) -> dict[str, Any]:
    """Lengths of the rows that are trained on, and how much padding the micro-batches hold."""
    rows = json.loads(Path(common.rows).read_text(encoding="utf-8"))[: common.steps * common.rows_per_step]
    lengths = sorted(len(row["input_ids"]) for row in rows)
    targets = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)

    def padded(ordered: list[Any]) -> float:
        size = common.rows_per_micro_batch
        pieces = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        area = sum(len(piece) * max(len(row["input_ids"]) for row in piece) for piece in pieces)
        return 1 - sum(lengths) / area

    return {
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": targets,
        "length_min_median_max": [lengths[0], statistics.median(lengths), lengths[-1]],
        "padding_as_given": round(padded(rows), 3),
        "padding_like_lengths_together": round(padded(_like_lengths_together(rows, common.rows_per_step)), 3),
    }


# -- running the jobs -------------------------------------------------------------------------------------------------


def run_all(specs: Iterable[tuple[str, dict[str, Any]]], work: Path) -> dict[str, dict[str, Any]]:
    """Every job in a process of its own; finished ones are taken from disk."""
    done: dict[str, dict[str, Any]] = {}
    for name, spec in specs:
        place = _place(name, spec, work)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            start = time.perf_counter()
            command = [sys.executable, __file__, "--job", json.dumps(spec), "--job-result", str(place)]
            quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            ended = subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if ended.returncode:
                print(ended.stderr.decode(errors="replace")[-3000:], file=sys.stderr)
                raise SystemExit(f"{name}: failed")
            print(f"{name:40s} {time.perf_counter() - start:6.0f} s in all", flush=True)
        done[name] = json.loads(place.read_text(encoding="utf-8"))
    return done


def _place(name: str, spec: dict[str, Any], work: Path) -> Path:
    """Where a job's result lies; another one after a change of settings, of lowmem's code, or of a version."""
    text = json.dumps(spec, sort_keys=True) + json.dumps(
        {k: version(k) for k in ("torch", "transformers", "peft", "trl")}
    )
    code = sorted((HERE.parent / "lowmem").rglob("*.py")) if spec["side"] == "lowmem" else []
    digest = hashlib.sha256(text.encode() + b"".join(path.read_bytes() for path in code)).hexdigest()[:12]
    return work / "jobs" / f"{name.replace(' ', '-')}-{digest}.json"


def contest(common: Common, repetitions: int) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, dict[str, Any]]]:
    """The jobs in their order, and the contestants; equal settings are one contestant."""
    contestants: dict[str, dict[str, Any]] = {}
    for settings in (TRL_DEFAULTS, TRL_FASTEST, TRL_SMALLEST):
        bf16 = settings.get("bf16", True)
        ours = {"side": "lowmem", "settings": {**LOWMEM, "bf16": bf16}}
        contestants[_lowmem_name(settings)] = ours
    for name, settings in trl_contestants().items():
        contestants[name] = {"side": "trl", "settings": settings}
    jobs = [(f"{name} memory", _spec(common, c, memory=True)) for name, c in contestants.items()]
    for repetition in range(repetitions):
        order = list(contestants.items())
        for name, contestant in order if repetition % 2 == 0 else reversed(order):
            jobs.append((f"{name} {repetition + 1}", _spec(common, contestant, memory=False)))
    return jobs, contestants


def trl_contestants() -> dict[str, dict[str, Any]]:
    """TRL's side, where two names for the same settings are one."""
    found = {"TRL defaults": TRL_DEFAULTS, "TRL fastest": TRL_FASTEST}
    if TRL_SMALLEST != TRL_FASTEST:
        found["TRL smallest"] = TRL_SMALLEST
    return found


def _lowmem_name(settings: dict[str, Any]) -> str:
    return "lowmem" if settings.get("bf16", True) else "lowmem float32"


def _spec(common: Common, contestant: dict[str, Any], memory: bool) -> dict[str, Any]:
    return {**contestant, "memory": memory, "common": asdict(common)}


# -- reporting --------------------------------------------------------------------------------------------------------


def summarise(name: str, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions of one contestant."""
    runs = [result for job, result in done.items() if job.rsplit(" ", 1)[0] == name and not job.endswith("memory")]
    memory = done[f"{name} memory"]
    return {
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in runs),
        "all_tokens_per_second": [round(r["tokens_per_second"], 2) for r in runs],
        "peak_rss": statistics.median(r["peak_rss"] for r in runs),
        "rss_before": statistics.median(r["rss_before"] for r in runs),
        "loss_after": statistics.median(r["loss_after"] for r in runs),
        "train_losses": runs[0]["train_losses"],
        "tokens": runs[0]["tokens"],
        "supervised_tokens": runs[0]["supervised_tokens"],
        "trainable": runs[0]["trainable"],
        **{key: memory[key] for key in ("weight_bytes", "peak_live_bytes", "peak_above_weights", "peak_operation")},
    }


def same_job(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs although it must not."""
    wrong = [
        f"{key}: {ours[key]} and {theirs[key]}"
        for key in ("tokens", "supervised_tokens", "trainable", "weight_bytes")
        if ours[key] != theirs[key]
    ]
    pairs = [("loss after the last step", ours["loss_after"], theirs["loss_after"])]
    # lowmem logs a last, shorter interval, too; only intervals that both have logged are compared.
    logged = zip(ours["train_losses"], theirs["train_losses"], strict=False)
    pairs += [(f"training loss of interval {i}", a, b) for i, (a, b) in enumerate(logged, start=1)]
    wrong += [f"{what}: {a:.4f} and {b:.4f}" for what, a, b in pairs if abs(a - b) > LOSS_TOLERANCE * abs(b)]
    return wrong


def report_table(found: dict[str, dict[str, Any]], ours: str, theirs: list[str]) -> str:
    """lowmem beside one or more settings of TRL."""
    rows = []
    for name in [ours, *theirs]:
        s, us = found[name], found[ours]
        speed = us["tokens_per_second"] / s["tokens_per_second"]
        memory = us["peak_above_weights"] / s["peak_above_weights"]
        row: list[object] = [name, f"{s['tokens_per_second']:.1f}", f"{s['peak_live_bytes'] / 2**20:.0f}"]
        row += [f"{s['peak_above_weights'] / 2**20:.0f}", f"{s['peak_rss'] / 2**20:.0f}", f"{s['loss_after']:.4f}"]
        rows.append([*row, *(["", ""] if name == ours else [f"{speed:.2f} x", f"{100 * memory:.0f} %"])])
    header = ["", "real tokens/s", "peak live MiB", "above the weights MiB", "peak RSS MiB", "loss after"]
    return table([*header, "lowmem's speed", "lowmem's bytes above the weights"], rows)


def report(common: Common, done: dict[str, dict[str, Any]], write: bool) -> int:
    """Print, and write, both tables; say which bars are met."""
    names = trl_contestants()
    found = {name: summarise(name, done) for name in {job.rsplit(" ", 1)[0] for job in done}}
    wrong = {name: same_job(found[_lowmem_name(settings)], found[name]) for name, settings in names.items()}
    ours = found[_lowmem_name(TRL_FASTEST)]
    best = [found[name] for name in names if name != "TRL defaults"]
    speed = min(ours["tokens_per_second"] / s["tokens_per_second"] for s in best)
    memory = max(ours["peak_above_weights"] / s["peak_above_weights"] for s in best)
    bars = [["speed", f">= {SPEED_BAR} x", f"{speed:.2f} x", "met" if speed >= SPEED_BAR else "missed"]]
    bars += [["bytes above the weights", f"<= {100 * MEMORY_BAR:.0f} %", f"{100 * memory:.0f} %"]]
    bars[1].append("met" if memory <= MEMORY_BAR else "missed")

    facts = next(reversed(done.values()))["environment"]
    numbers = {k: v for k, v in asdict(common).items() if k not in ("model", "rows")}
    numbers |= {"model": Path(common.model).name, **describe(common)}
    parts = ["# lowmem and TRL at the same LoRA job\n\nMade by `python benchmarks/versus_trl.py`; medians over "]
    parts[0] += f"{len(ours['all_tokens_per_second'])} repetitions, bytes from a run of their own."
    parts.append("## Table A: TRL's defaults\n\n" + report_table(found, _lowmem_name(TRL_DEFAULTS), ["TRL defaults"]))
    others = [name for name in names if name != "TRL defaults"]
    parts.append("## Table B: TRL's best settings\n\n" + report_table(found, _lowmem_name(TRL_FASTEST), others))
    parts.append(table(["bar, against table B", "asked", "measured", ""], bars))
    parts.append("## Settings\n\n" + table(["", ""], [[f"`{n}`", f"`{json.dumps(s)}`"] for n, s in names.items()]))
    parts.append(table(["equal on both sides", ""], [[f"`{k}`", f"`{json.dumps(v)}`"] for k, v in numbers.items()]))
    parts.append("## Made with\n\n" + as_table(facts))
    if any(wrong.values()):
        lines = [f"- {name}: {text}" for name, texts in wrong.items() for text in texts]
        parts.insert(1, "**The sides did not do the same job, so nothing below counts:**\n\n" + "\n".join(lines))
    text = "\n\n".join(parts) + "\n"
    print("\n" + text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "versus_trl.md").write_text(text, encoding="utf-8")
        content = {"environment": facts, "common": numbers, "settings": names, "lowmem": LOWMEM, "found": found}
        content |= {"bars": {"speed": speed, "memory": memory}, "wrong": wrong, "jobs": done}
        (RESULTS / "versus_trl.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if any(wrong.values()):
        return 2
    return 0 if speed >= SPEED_BAR and memory <= MEMORY_BAR else 1


def search(common: Common, repetitions: int, work: Path, write: bool, only: list[str] | None) -> int:
    """Every candidate of both sides; the best of TRL belong into TRL_FASTEST and TRL_SMALLEST, lowmem's into LOWMEM."""
    sides = {"trl": TRL_CANDIDATES, "lowmem": LOWMEM_CANDIDATES}
    specs = {
        f"{side} {name}": {"side": side, "settings": s}
        for side, all_ in sides.items()
        for name, s in all_.items()
        if not only or f"{side} {name}" in only
    }
    jobs = [(f"{name} memory", _spec(common, spec, memory=True)) for name, spec in specs.items()]
    for repetition in range(repetitions):
        jobs += [(f"{name} {repetition + 1}", _spec(common, spec, memory=False)) for name, spec in specs.items()]
    done = run_all(((f"search {name}", spec) for name, spec in jobs), work)
    found = {name: summarise(f"search {name}", done) for name in specs}
    rows = [
        [name, f"{s['tokens_per_second']:.1f}", f"{s['peak_above_weights'] / 2**20:.0f}", f"{s['loss_after']:.4f}"]
        for name, s in sorted(found.items(), key=lambda item: -item[1]["tokens_per_second"])
    ]
    text = table(["candidate", "real tokens/s", "above the weights MiB", "loss after"], rows)
    print("\n" + text)
    if write:
        facts = next(reversed(done.values()))["environment"]
        settings = table(["candidate", "settings"], [[n, f"`{json.dumps(s['settings'])}`"] for n, s in specs.items()])
        RESULTS.mkdir(exist_ok=True)
        page = "\n\n".join(["# Candidates for the best settings of both sides", text, settings, as_table(facts)]) + "\n"
        (RESULTS / "versus_trl_search.md").write_text(page, encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, 3 steps; nothing is written")
    parser.add_argument("--search", action="store_true", help="try the candidates for the best settings")
    parser.add_argument("--only", nargs="+", help="with --search: candidates such as 'trl eager attention'")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is done")
    parser.add_argument("--fresh", action="store_true", help="forget the jobs that are done")
    parser.add_argument("--repetitions", type=int, help="timed runs of each contestant (default 3; 1 for --search)")
    parser.add_argument("--steps", type=int, help="optimizer steps of a timed run")
    parser.add_argument("--data", help="JSONL of instruction, prompt/completion or chat rows (default: made-up ones)")
    parser.add_argument("--model", default="smollm2", help="alias, hub id, folder or GGUF file")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the frozen weights")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for weights, rows and finished jobs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--job-result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        result = run_job(json.loads(arguments.job))
        partial = arguments.job_result.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        partial.replace(arguments.job_result)
        return 0
    if arguments.fresh:
        shutil.rmtree(arguments.work / "jobs", ignore_errors=True)
    common = prepare(arguments)
    write = not arguments.quick
    if arguments.search:
        return search(common, arguments.repetitions or 1, arguments.work, write, arguments.only)
    jobs, _ = contest(common, arguments.repetitions or (1 if arguments.quick else 3))
    if arguments.report:
        jobs = [(name, spec) for name, spec in jobs if _place(name, spec, arguments.work).exists()]
    done = run_all(jobs, arguments.work)
    status = report(common, done, write)
    return 0 if arguments.quick and status == 1 else status


if __name__ == "__main__":
    sys.exit(main())
