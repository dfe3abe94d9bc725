"""Evaluate, generate, chat: the numbers of training, transformers' own answers, and one line for every mistake."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases.helpers import REPO, here, llama, numbers, rows
from conftest import make_llama
from test_data import CHAT, PROMPT, byte_tokenizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem import (
    ChunkedCrossEntropy,
    DataConfig,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    Packing,
    Trainer,
    UserError,
    load_run,
)
from lowmem.answers import Sampling
from lowmem.conversation import Conversation, Streamer, talk
from lowmem.evaluation import Scores, evaluate
from lowmem.loaded import LoadedRun
from lowmem.model import call, learned_positions
from lowmem.prompts import read_prompts
from lowmem.recipe import Recipe
from lowmem.run import Run

TALKS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
    for text in ("a", "bb", "a long one", "cc")
]
VOCABULARY = 261


def around(model: nn.Module, tokenizer=None, *strategies, **training) -> LoadedRun:
    """A model in memory, as `load_run` would give it."""
    training = numbers(**training)
    run = Run(training, torch.device("cpu"), frozenset(), model=model.eval())
    ordered = sorted(strategies, key=lambda strategy: strategy.stage)
    recipe = Recipe(None, DataConfig(), training, list(strategies))
    return LoadedRun(model, tokenizer, recipe, "memory", run, ordered)


def small(kind: str, **config) -> nn.Module:
    import transformers

    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**{**shape, **config})
    return getattr(transformers, f"{kind}ForCausalLM")(made).eval()


@torch.no_grad()
def directly(model: nn.Module, data: list[dict]) -> tuple[float, float]:
    """Loss and token accuracy, row by row from all logits."""
    losses, hits, targets = 0.0, 0, 0
    for row in data:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        logits = call(model, {"input_ids": ids})[0, :-1].double()
        kept = labels != -100
        losses += nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum").item()
        hits += int((logits.argmax(-1)[kept] == labels[kept]).sum())
        targets += int(kept.sum())
    return losses / targets, hits / targets


# -- evaluate ---------------------------------------------------------------------------------------------------------

MODELS = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Cohere": {"logit_scale": 0.1},
    "Granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_accuracy_are_those_of_all_logits(kind):
    model = small(kind, **MODELS[kind])
    data = rows(12)
    greedy = [call(model, {"input_ids": torch.tensor([row["input_ids"]])})[0].argmax(-1).tolist() for row in data[:6]]
    for row, ids in zip(data, greedy, strict=False):  # half of the rows hold some right predictions
        row["labels"][4:] = [
            a if i % 3 else b for i, (a, b) in enumerate(zip(ids[3:-1], row["labels"][4:], strict=True))
        ]
    loaded = around(model, eval_batch_size=5)
    loss, accuracy = directly(model, data)
    assert 0.1 < accuracy < 0.9
    result = evaluate(loaded, data)
    assert math.isclose(result["eval_loss"], loss, rel_tol=1e-5)
    assert math.isclose(result["token_accuracy"], accuracy)
    assert math.isclose(result["perplexity"], math.exp(loss), rel_tol=1e-4)
    assert not loaded.notices


STRATEGIES = {
    "none": list,
    "chunked": lambda: [ChunkedCrossEntropy(chunk_size=8)],
    "autocast": lambda: [MixedPrecision()],
    "fp16 autocast": lambda: [MixedPrecision(dtype="float16")],
    "packing and accumulation": lambda: [Packing(), GradientAccumulation(micro_batch_size=2)],
    "all": lambda: [ChunkedCrossEntropy(), MixedPrecision(), Packing(), GradientAccumulation(micro_batch_size=2)],
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_loss_is_the_trainers(name):
    trainer = Trainer(make_llama(), rows(), rows(9, seed=3), training=numbers(), strategies=STRATEGIES[name]())
    expected = trainer.evaluate()
    loaded = around(make_llama(), None, *STRATEGIES[name]())
    result = evaluate(loaded, rows(9, seed=3))
    tolerance = 2e-6 if name in ("none", "chunked", "packing and accumulation") else 1e-3  # 16 bits round otherwise
    assert math.isclose(result["eval_loss"], expected["eval_loss"], rel_tol=tolerance)
    assert result["eval_tokens"] == expected["eval_tokens"]
    weighted = [{**row, "loss_weights": [i % 3 + 0.5 for i in range(len(row["labels"]))]} for row in rows(9, seed=3)]
    result = evaluate(loaded, weighted)
    assert math.isclose(result["eval_loss"], trainer.evaluate(weighted)["eval_loss"], rel_tol=1e-3)


class LargestTensor(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("strategies", [[], [ChunkedCrossEntropy()]], ids=["plain recipe", "chunked recipe"])
def test_c701_the_logits_of_all_tokens_never_exist(strategies):
    vocabulary = 32_000
    model = make_llama(vocab_size=vocabulary).eval()
    data = rows(2, low=400, high=401)
    with LargestTensor() as watch:
        evaluate(around(model, None, *strategies, eval_batch_size=2, max_length=400), data)
    # a chunk of 131 tokens on a CPU, not the 2 x 399 of the batch
    assert watch.largest <= 131 * vocabulary < 2 * 399 * vocabulary / 6


def test_a_head_that_is_no_plain_linear_layer_falls_back_and_says_so():
    trainer = Trainer(make_llama(), rows(), training=numbers(learning_rate=0.05, max_steps=2),
                      strategies=[LoRA(r=2, target_modules=["lm_head", "q_proj"])])  # fmt: skip
    trainer.train()
    loaded = around(trainer.model)
    result = evaluate(loaded, rows(9, seed=3))
    loss, accuracy = directly(trainer.model, rows(9, seed=3))
    assert math.isclose(result["eval_loss"], loss, rel_tol=1e-5)
    assert math.isclose(result["token_accuracy"], accuracy)
    assert "no plain linear layer" in loaded.notices[0]


def test_a_head_with_more_to_it_is_noticed():
    class Twisted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_llama()
            self.lm_head = self.inner.lm_head

        def forward(self, input_ids):
            return self.inner(input_ids).logits.square()

    model = Twisted().eval()
    scores = Scores()
    through = scores.through(around(model))
    with torch.no_grad():
        through([rows(2)], 1.0)
    assert scores.plain_head is False


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
def test_rows_beyond_learned_positions_take_one_line(kind, tmp_path):
    import transformers

    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_positions": 64, "n_layer": 1, "n_head": 2}
    opt = {"vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32}
    opt |= {"max_position_embeddings": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**(shape if kind == "GPT2" else opt))
    model = transformers.AutoModelForCausalLM.from_config(config)
    long, fits = [{"input_ids": [7] * 65}], [{"input_ids": [7] * 64}]
    wanted = "rows have up to 65 tokens, and the model has positions for 64; set it to 64"
    loaded = around(model, byte_tokenizer(CHAT + PROMPT), max_length=128)
    assert math.isfinite(evaluate(loaded, fits)["eval_loss"])
    with pytest.raises(UserError, match=wanted):
        evaluate(loaded, long)
    with pytest.raises(UserError, match=r"prompt 1 has .* the model's context 64"):
        evaluate(loaded, fits, [{"prompt": "x" * 70, "completion": "y"}])
    for train, held_out in ((long, fits), (fits, long)):
        with pytest.raises(UserError, match=wanted):
            Trainer(model, train, held_out, training=numbers(max_length=128))
    Trainer(model, fits, fits, training=numbers(max_length=128))


def test_computed_positions_have_no_end():
    model = small("Llama", vocab_size=256, max_position_embeddings=256)
    assert learned_positions(model) is None


def test_a_loss_that_is_not_finite_is_an_error():
    model = make_llama()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(UserError, match="the loss is nan"):
        evaluate(around(model), rows(3))


MEMORY = """
import resource, sys
import torch
sys.path[:0] = [{repo!r}, {tests!r}]
from cases.helpers import llama, rows, numbers
from lowmem import Trainer
from test_use import around
torch.set_num_threads(1)
model = llama(vocab_size=32_000)
data = rows(int(sys.argv[1]), low=128, high=129, vocabulary=32_000)
loaded = around(model, eval_batch_size=1, max_length=128)
loaded.evaluate(data[:2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded.evaluate(data)
Trainer(model, data[:1], training=numbers(eval_batch_size=1, max_length=128)).evaluate(data)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_c701_peak_memory_of_evaluation():
    script = MEMORY.format(repo=str(REPO), tests=str(REPO / "tests"))
    kib = []
    for number in (50, 200):
        done = subprocess.run([sys.executable, "-c", script, str(number)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kib.append(int(done.stdout.split()[-1]))
    assert max(kib) < 300 * 1024, kib
    assert abs(kib[1] - kib[0]) < 30 * 1024, kib


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Path:
    """A run that has learnt to say ok."""
    folder = tmp_path_factory.mktemp("talker")
    llama(vocab_size=VOCABULARY).save_pretrained(folder / "base")
    tokenizer = byte_tokenizer(CHAT + PROMPT)
    tokenizer.save_pretrained(folder / "base")
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS), encoding="utf-8")
    longer = [
        {"messages": [{"role": "system", "content": "s"}, *row["messages"], *TALKS[0]["messages"]]} for row in TALKS
    ]
    trainer = Trainer(
        str(folder / "base"),
        [*TALKS, *longer],
        training=numbers(max_steps=50, learning_rate=1e-2, output_dir=str(folder / "out"), max_length=128),
        strategies=[MixedPrecision()],
        data=DataConfig(exact_match=str(folder / "held_out.jsonl")),
    )
    trainer.train()
    return folder / "out"


def one_line(done) -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert "Traceback" not in done.stderr
    return errors[0]


def test_evaluate_a_run(talker):
    done = here("evaluate", str(talker), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["exact_match"] == 1.0
    assert facts["exact_match_rows"] == facts["eval_rows"] == 4
    assert facts["token_accuracy"] == 1.0
    assert facts["eval_tokens"] == 12  # o, k, <eos>
    assert facts["eval_data"] == facts["exact_match_data"] == str(talker.parent / "held_out.jsonl")
    assert 1 <= facts["perplexity"] < 1.2
    baseline = json.loads(here("evaluate", str(talker.parent / "base"), "--data", facts["eval_data"], "--json").stdout)
    assert baseline["perplexity"] > 50
    assert "exact_match" not in baseline
    shown = here("evaluate", str(talker), "--data", facts["eval_data"], "training.eval_batch_size=2").stdout
    assert "token accuracy  100.00%" in shown
    assert "exact match" not in shown.replace("exact match apart", "")


def test_generate_for_every_kind_of_prompt(talker, tmp_path):
    assert here("generate", str(talker), "--prompt", "hello").stdout == "ok\n"
    many = tmp_path / "many.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "one"}]},
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "no"}]},
        {"instruction": "three", "input": "more"},
        {"prompt": [{"role": "user", "content": "four"}]},
        {"instruction": "five", "output": "x"},
    ]
    many.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    out = tmp_path / "answers.jsonl"
    done = here("generate", str(talker), "--file", str(many), "--output", str(out), "--batch-size", "2")
    assert done.stdout == f"{out}\n", done.stderr
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [a["prompt"] for a in answers] == ["one", "two", "three\n\nmore", "four", "five"]
    assert all(a["answer"] == "ok" for a in answers)
    (tmp_path / "lines.txt").write_text("안녕\n\nbye\n", encoding="utf-8")
    facts = json.loads(here("generate", str(talker), "--file", str(tmp_path / "lines.txt"), "--json").stdout)
    assert [fact["prompt"] for fact in facts] == ["안녕", "bye"]


def test_prompts_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    lines = [
        {"prompt": "Once upon", "completion": " a time"},
        {"text": "In the beginning"},
        {"messages": TALKS[0]["messages"] * 2, "tools": [tool]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, second, third = read_prompts(file, DataConfig(), chat=True)
    assert (first, second) == ("Once upon", "In the beginning")
    assert [m["role"] for m in third.messages] == ["user", "assistant", "user"]
    assert third.tools == [tool]
    turns = [{"from": "human", "value": "hi"}]
    file.write_text(json.dumps({"conversations": turns}) + "\n", encoding="utf-8")
    assert read_prompts(file, DataConfig(), chat=True)[0].messages == [{"role": "user", "content": "hi"}]
    file.write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"rows.jsonl:1: nothing is asked"):
        read_prompts(file, DataConfig(), chat=True)
    assert read_prompts(file, DataConfig(on_bad_row="skip"), chat=True) == ["x"]


def test_mistakes_take_one_line(talker, tmp_path):
    run = str(talker)
    assert "there is no prompt" in one_line(here("generate", run))
    assert "the prompt is empty" in one_line(here("generate", run, "--prompt", " "))
    assert "not both" in one_line(here("generate", run, "--prompt", "x", "--file", "y"))
    assert "no effect on greedy" in one_line(here("generate", run, "--prompt", "x", "--top-p", "0.9"))
    assert "no effect on greedy" in one_line(
        here("generate", run, "--prompt", "x", "--temperature", "0", "--top-p", "0.9")
    )
    assert "no effect on greedy" in one_line(here("generate", run, "--prompt", "x", "--seed", "1"))
    assert "up to 1" in one_line(here("generate", run, "--prompt", "x", "--temperature", "1", "--top-p", "1.5"))
    assert "no such folder" in one_line(here("generate", run, "--prompt", "x", "--output", "/no/where/x"))
    assert "no checkpoint of step 9; it has none" in one_line(here("chat", run, "--checkpoint", "9"))
    assert "no such run" in one_line(here("evaluate", str(tmp_path / "none")))
    assert "give a file with --data" in one_line(here("evaluate", str(talker.parent / "base")))
    assert "no such file" in one_line(here("evaluate", run, "--data", str(tmp_path / "none.jsonl")))
    assert "has no effect" in one_line(here("evaluate", run, "training.seed=1"))
    assert "has no effect" in one_line(here("evaluate", run, "model.chat_template='{{ messages }}'"))
    assert "64 bits" in one_line(here("generate", run, "--prompt", "x", "--temperature", "1", "--seed", str(2**64)))
    assert "for 187 new tokens" in one_line(  # <bos>, <u>, 66 bytes, <a> of a context of 256
        here("generate", run, "--prompt", "x" * 66, "--max-new-tokens", "188")
    )
    assert "no effect on rows" in one_line(here("generate", run, "--file", "x.jsonl", "--raw"))
    assert "do not fit into a context of 256" in one_line(here("chat", run, "--max-new-tokens", "300"))


def test_the_commands_in_a_process_of_their_own(talker):
    done = subprocess.run(
        [sys.executable, "-m", "lowmem", "chat", str(talker), "--max-new-tokens", "8"],
        input="hello\n/quit\n", capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# -- generating -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    return byte_tokenizer(CHAT + PROMPT)


@pytest.fixture
def speaker(tokenizer) -> LoadedRun:
    """A model that says anything."""
    return around(small("Llama", vocab_size=VOCABULARY).double(), tokenizer)


def test_greedy_answers_are_transformers_own(speaker, tokenizer):
    prompts = ["안녕", "a much longer prompt", "x"]
    expected = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = speaker.model.generate(**inputs, do_sample=False, max_new_tokens=12)
        expected.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    assert len(set(expected)) == 3
    for size in (1, 3):
        assert speaker.generate(prompts, max_new_tokens=12, batch_size=size) == expected


def test_the_kv_cache_is_used(speaker):
    lengths = []
    speaker.model.register_forward_pre_hook(
        lambda module, arguments, options: lengths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    speaker.model.config.use_cache = False  # as a training run may have left it
    speaker.generate(["some prompt"], max_new_tokens=6)
    assert lengths == [11, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("setting", [{"return_dict_in_generate": True}, {"num_beams": 2, "num_return_sequences": 2}])
def test_a_generation_config_that_asks_for_other_output(speaker, setting):
    expected = speaker.generate(["x", "yy"], 8)
    speaker.model.generation_config.update(**setting)
    assert speaker.generate(["x", "yy"], 8) == expected


def test_sampling_is_repeatable_and_leaves_the_generator_alone(speaker):
    # the model's own config must not narrow what is drawn
    speaker.model.generation_config.update(top_k=1, min_p=1.0, typical_p=0.01)
    state = torch.get_rng_state()
    draw = [speaker.generate(["x"], 8, sampling=Sampling(1.5, seed=seed)) for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert torch.equal(torch.get_rng_state(), state)
    greedy = speaker.generate(["x"], 8)
    assert speaker.generate(["x"], 8, sampling=Sampling(1.0, top_p=1e-6, seed=3)) == greedy
    with pytest.raises(UserError, match="temperature"):
        Sampling(-1.0)


def test_what_a_model_cannot_do(tokenizer):
    with pytest.raises(UserError, match="there is no tokenizer"):
        around(make_llama()).generate(["x"])
    with pytest.raises(UserError, match="has no generate"):
        around(nn.Linear(2, 2), tokenizer).generate(["x"])
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(UserError, match=r"refuses the messages: .*no system here"):
        around(small("Llama"), tokenizer).generate([[{"role": "system", "content": "x"}]])


# -- chat -------------------------------------------------------------------------------------------------------------


def talked(loaded: LoadedRun, *lines: str | None, **options) -> tuple[Conversation, str, list[str]]:
    notices: list[str] = []
    conversation = Conversation(loaded, notice=notices.append, **{"max_new_tokens": 8, **options})
    out = io.StringIO()
    talk(conversation, iter(lines), out, notices.append)
    return conversation, out.getvalue(), notices


def test_a_conversation_keeps_its_history(talker):
    loaded = load_run(talker)
    conversation, out, notices = talked(loaded, "one", "", "two", None, "/help", system="be brief")
    assert out == "ok\nok\n"
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert len(notices) == 2
    assert "unknown command /help" in notices[1]
    conversation, out, notices = talked(loaded, "one", "/reset", "two", "/quit", "three")
    assert [m["content"] for m in conversation.messages] == ["two", "ok"]
    assert notices == ["the conversation is forgotten"]


def test_chat_reads_a_pipe(talker, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n안녕\n"))
    done = here("chat", str(talker), "--max-new-tokens", "8", "--system", "s")
    assert (done.returncode, done.stdout) == (0, "ok\nok\n"), done.stderr


def test_a_history_beyond_the_context_loses_its_beginning(talker):
    loaded = load_run(talker)
    conversation, _, notices = talked(loaded, "first " + "x" * 100, "y" * 100, "z" * 80, max_new_tokens=16)
    assert notices == ["the conversation is longer than the model's context: the first 1 turns are forgotten"]
    assert [m["content"][0] for m in conversation.messages if m["role"] == "user"] == ["y", "z"]
    conversation, out, notices = talked(loaded, "hi", "w" * 250)
    assert "the question has 253 tokens" in notices[0]
    assert [m["content"] for m in conversation.messages] == ["hi", "ok"]
    assert out == "ok\n\n"


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(speaker):
    pieces: list[str] = []

    def say(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    conversation = Conversation(speaker, max_new_tokens=40)
    answer = conversation.ask("hello", say)
    assert answer
    assert answer == "".join(pieces).strip()
    assert conversation.messages[-1] == {"role": "assistant", "content": answer}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_streamed_pieces_are_whole_characters(tokenizer):
    text = "안녕 👋🏽 naïve"
    pieces: list[str] = []
    streamer = Streamer(tokenizer, pieces.append)
    ids = tokenizer(text)["input_ids"]
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for number in ids:
        streamer.put(torch.tensor([number]))
    assert "".join(pieces) == text
    assert pieces == list(text)
    streamer.put(torch.tensor([tokenizer("é")["input_ids"][0]]))  # half a character, and then the end
    streamer.end()
    assert "".join(pieces) == text + "\ufffd"


def test_streaming_says_what_generating_says(speaker):
    pieces: list[str] = []
    answer = Conversation(speaker, max_new_tokens=20).ask("hello", pieces.append)
    assert answer == speaker.generate([[{"role": "user", "content": "hello"}]], 20)[0]
    assert len(pieces) > 3


def test_a_small_context_shortens_the_answers_of_a_chat(talker):
    speaker = load_run(talker)
    assert speaker.model.config.max_position_embeddings == 256
    assert Conversation(speaker).max_new_tokens == 128
    speaker.model.config.max_position_embeddings = 4096
    assert Conversation(speaker).max_new_tokens == 512
