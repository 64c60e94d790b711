"""How fast we train and translate beside the peers, beside what the machine can do, and in how much memory.

    python scripts/benchmark.py --dataset_name <multi30k folder> --model <trained folder> --marian <trained folder>

Every engine lives in a process of its own, so that nobody's threads disturb another. The processes take turns, round by
round, after one round of warm-up (scripts/taking_turns.py). What each round found is merged into
scripts/results/benchmark.json, section by section (`--only`); scripts/results_table.py makes tables of ratios of it.

- **machine**: operations a second of products of 1024 x 1024 matrices, by linear layers that are packed where that is
  faster (packed.py); bytes read and written a second by a copy.
- **training**: some batches of an epoch of Multi30k inside each trainer, evenly spread over short and long ones, from
  the end of the first step to the end of the last; target tokens a second, padding not counted. Same sizes, dropout
  (JoeyNMT has it inside of attention and feed-forward networks as well), label smoothing, learning rate and clipping,
  AdamW (fused in all but JoeyNMT, which has no such option). Ours: batches by token budget; or transformers' plain
  Seq2SeqTrainer. MarianMT: Seq2SeqTrainer with its label smoother. Both Seq2SeqTrainers group the whole corpus by
  length and get the best of three batch sizes. `torch.nn.Transformer`: a loop by hand over our batches. JoeyNMT, where
  it is installed: its own trainer and batches.
- **one step**: operations of the matrix products of our training step, padding included, a second, beside those of the
  machine: the ratio of the two says how far we are from the lower bound.
- **peak memory**: resident memory that a training step of 4,096 target tokens takes above what model and optimiser
  hold; vocabulary 32,000; every round in a fresh process. Also with `gradient_checkpointing`, an option of transformers
  that keeps only what goes into each layer and computes the rest again.
- **large step**: target tokens a second of the same steps, warm.
- **translation**: sentences a second. Test set 2016 with a trained model, and MarianMT with the same weights
  (`vanilla-transformer export --format marian`) or its own (scripts/train_marian.py); `paper-base` with random weights,
  200 sentences, 13 tokens each (the end of a sentence is made impossible). Ours and MarianMT through `translate`,
  without what it would make of MarianMT's weights (packed.py), which is no part of that peer; CTranslate2 through its
  own batching; every engine with the best of four batch sizes, CTranslate2 also with the better of one batch at a time
  by all threads and a batch for each thread. int8 of ours and of MarianMT: `--dtype int8`, which takes both. Ours with
  workers: a process for each thread, started before, as by `--workers`.
- **depth**: the presets with a deep encoder and one decoder layer beside the symmetric ones, random weights as above.
- **two processes**: scripts/train.py with half of the threads each, against one process with all of them and the same
  tokens per update; target tokens a second of an epoch.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.arguments import parse_arguments
from hf_vanilla_transformer.batching import PairCollator, TokenBatchSampler, TrainingPairs
from hf_vanilla_transformer.corpus import read_pairs
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.int8 import quantize_linear_layers
from hf_vanilla_transformer.packed import packed_linear_layers
from hf_vanilla_transformer.preparation import prepare_corpus, token_lengths
from hf_vanilla_transformer.translation import load_model, translate
from hf_vanilla_transformer.workers import Workers
from taking_turns import (
    Engine,
    Engines,
    Measure,
    Round,
    argument_parser,
    best,
    give_memory_back,
    measure_sections,
    peak_memory,
)
from train_marian import marian_like
from trainers import (
    BASE,
    TINY,
    TRAINERS,
    Shape,
    marian_trainer,
    prepared,
    random_batch,
    seq2seq_trainer,
    step_operations,
    training_step,
)

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "scripts" / "results" / "benchmark.json"
BATCH_SIZES = (2048, 4096, 8192, 16384)  # tokens, of translation
LENGTH = 13  # tokens of a translation by a model with random weights
PRECISIONS = {"float32": False, "bfloat16": True}
WORKERS = "ours, workers"
SHALLOW = {TINY.preset: "multi30k-deep-shallow", BASE.preset: "deep-shallow"}


# ---- machine ----


def matrix_products(options: argparse.Namespace, dtype: str) -> Measure:
    """Work: floating-point operations."""
    matrix = torch.randn(1024, 1024).to(getattr(torch, dtype))
    layer = torch.nn.Linear(1024, 1024, bias=False, dtype=matrix.dtype)

    @torch.inference_mode()
    def measure(number: int) -> Round:
        with packed_linear_layers(layer):
            layer(matrix)
            started = time.perf_counter()
            for _ in range(20):
                layer(matrix)
            seconds = time.perf_counter() - started
        return {"work": 20 * 2 * 1024**3, "seconds": seconds}

    return measure


def memory_copy(options: argparse.Namespace) -> Measure:
    """Work: bytes read and bytes written."""
    source = torch.ones(2**24)  # 64 MiB
    target = torch.empty_like(source)

    def measure(number: int) -> Round:
        started = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        return {"work": 10 * 2 * source.nbytes, "seconds": time.perf_counter() - started}

    return measure


# ---- training ----


def training(options: argparse.Namespace, shape: Shape, trainer: str, bf16: bool) -> Measure:
    """Work: target tokens, padding not counted."""
    corpus, config = prepared(options.folder, shape)

    def measure(number: int, tokens: int, parts: int) -> Round:
        set_seed(number)
        folder, part = Path(options.folder) / f"{os.getpid()}", slice(number % parts, None, parts)
        round = TRAINERS[trainer](folder, corpus.tokenizer, config, corpus.train, tokens, bf16, part)
        give_memory_back()  # nine trainers wait side by side
        return {**round, "tokens": tokens}

    tokens = shape.tokens
    if TRAINERS[trainer] in (seq2seq_trainer, marian_trainer):
        sizes = [options.batch_tokens] if options.batch_tokens else [tokens // 2, tokens, 2 * tokens]
        tokens = best(sizes, lambda size: measure(0, size, shape.trial))
    parts = 4 * shape.parts if trainer == "joeynmt" else shape.parts  # or a round of it takes minutes
    return lambda number: measure(number, tokens, parts)


# ---- one step ----


def our_step(options: argparse.Namespace, shape: Shape, bf16: bool) -> Measure:
    """Work: floating-point operations of matrix products."""
    corpus, config = prepared(options.folder, shape)
    pairs, collate = TrainingPairs(corpus.train), PairCollator(config.pad_token_id)
    sampler = TokenBatchSampler(np.maximum(*token_lengths(corpus.train)), shape.tokens, seed=1)
    batches = [collate(pairs.__getitems__(keys)) for keys, _ in zip(sampler, range(4), strict=False)]
    work = sum(step_operations(config, batch) for batch in batches)
    step = training_step(VanillaTransformerForConditionalGeneration(config), bf16)

    def measure(number: int) -> Round:
        started = time.perf_counter()
        for batch in batches:
            step(batch)
        return {"work": work, "seconds": time.perf_counter() - started, "steps": len(batches)}

    return measure


# ---- peak memory, large step ----

CHECKPOINTED = "ours, gradient checkpointing"
LARGE = 128, 32  # sentences, tokens of each on both sides


def large_step(shape: Shape, engine: str, bf16: bool) -> Callable[[], None]:
    """A training step on random words, to be run again and again."""
    config = shape.config(32_000)
    model = marian_like(config) if engine == "marian" else VanillaTransformerForConditionalGeneration(config)
    if engine == CHECKPOINTED:
        model.gradient_checkpointing_enable()
    step = training_step(model, bf16)
    step(random_batch(config, 2, 32))  # makes the optimiser's state and whatever libraries keep
    return partial(step, random_batch(config, *LARGE))


def step_memory(options: argparse.Namespace, *engine: Any) -> Measure:
    """Bytes, measured once."""
    step = large_step(*engine)
    return lambda number: {"bytes": peak_memory(step)}


def step_speed(options: argparse.Namespace, *engine: Any) -> Measure:
    """Work: target tokens."""
    step = large_step(*engine)

    def measure(number: int) -> Round:
        step()  # touches the memory that was given back
        started = time.perf_counter()
        for _ in range(3):
            step()
        seconds = time.perf_counter() - started
        give_memory_back()  # six engines wait side by side
        return {"work": 3 * prod(LARGE), "seconds": seconds}

    return measure


# ---- translation ----


def translation(options: argparse.Namespace, engine: str, dtype: str, beams: int) -> Measure:
    """Work: sentences of the test set, by trained models."""
    if engine != "ctranslate2":
        folder = options.marian if engine == "marian" else options.model
        model, tokenizer = load_model(folder, device="cpu", dtype=dtype)
        return searching(options, engine, model, tokenizer, test_set(options), beams)
    return searching_with_ctranslate2(
        options, *load_model(options.model, device="cpu"), test_set(options), beams, dtype
    )


def forced_translation(
    options: argparse.Namespace, engine: str, dtype: str, beams: int, shape: Shape = BASE
) -> Measure:
    """Work: sentences, by models with random weights that never end a sentence by themselves.

    Each round says how many floating-point operations its matrix products had to have at least.
    """
    corpus, config = prepared(options.folder, shape)
    config.lm_head_bias = True
    model = marian_like(config) if engine == "marian" else VanillaTransformerForConditionalGeneration(config)
    never_ending(model, LENGTH, beams)
    sentences = test_set(options)[:200]
    lengths = [len(ids) for ids in corpus.tokenizer(sentences)["input_ids"]]
    operations = search_operations(config, lengths, LENGTH, beams)
    if engine != "ctranslate2":
        model = quantize_linear_layers(model.eval()) if dtype == "int8" else model.to(getattr(torch, dtype)).eval()
        measure = searching(options, engine, model, corpus.tokenizer, sentences, beams)
    else:
        measure = searching_with_ctranslate2(options, model, corpus.tokenizer, sentences, beams, dtype)
    return lambda number: {**measure(number), "operations": operations}


def search_operations(config: VanillaTransformerConfig, lengths: Sequence[int], written: int, beams: int) -> int:
    """Floating-point operations of the matrix products of a search, without padding.

    Args:
        lengths: tokens of each source.
        written: tokens of each translation. At the first one all beams are one.
    """
    d, (encoder_ff, decoder_ff) = config.d_model, (config.encoder_ffn_dim, config.decoder_ffn_dim)
    total = 0
    for source in lengths:
        encoder = source * (4 * d * d + 2 * d * encoder_ff) + 2 * source * source * d
        of_memory = source * 2 * d * d  # keys and values of the cross-attention
        for step in range(written):
            rows = beams if step else 1
            layer = 6 * d * d + 2 * d * decoder_ff + 2 * (step + 1 + source) * d
            total += rows * (config.decoder_layers * layer + d * config.vocab_size)
        total += config.encoder_layers * encoder + config.decoder_layers * of_memory
    return 2 * total


def never_ending(model: PreTrainedModel, length: int, beams: int) -> PreTrainedModel:
    """A model whose output projection has a bias, made to write `length` tokens, whatever it reads."""
    bias = model.lm_head.bias.data if model.lm_head.bias is not None else model.final_logits_bias
    bias[..., model.config.eos_token_id] = -1e4
    with_start = length + 1
    model.generation_config.update(max_length=with_start, num_beams=beams, early_stopping=beams > 1)
    return model


def test_set(options: argparse.Namespace) -> list[str]:
    pairs = read_pairs(dataset=options.dataset_name, split="test_2016_flickr", source_lang="en", target_lang="de")
    return [pair.source for pair in pairs]


def searching(options, engine: str, model, tokenizer, sentences: list[str], beams: int) -> Measure:
    if engine == WORKERS:
        search = options.closing.enter_context(Workers(model, tokenizer, options.threads)).translate
    else:
        search = partial(translate, model if engine != "marian" else unpacked(model), tokenizer)

    def run(some: list[str], tokens: int) -> None:
        search(some, num_beams=beams, max_tokens_per_batch=tokens)

    return timed(run, sentences, [(size,) for size in BATCH_SIZES])


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose linear layers `translate` leaves alone."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = layer.forward
    return model


def searching_with_ctranslate2(options, model, tokenizer, sentences: list[str], beams: int, dtype: str) -> Measure:
    from hf_vanilla_transformer.ctranslate2_export import CTranslate2Engine, export_ctranslate2

    folder = export_ctranslate2(model, tokenizer, Path(options.folder) / f"{os.getpid()}", dtype)
    engines = {
        parallel: CTranslate2Engine(folder, threads=options.threads // parallel, parallel_batches=parallel)
        for parallel in dict.fromkeys((1, options.threads))
    }

    def run(some: list[str], tokens: int, parallel: int) -> None:
        engines[parallel].translate(some, num_beams=beams, max_tokens_per_batch=tokens)

    return timed(run, sentences, list(product(BATCH_SIZES, engines)))


def timed(run: Callable[..., None], sentences: list[str], settings: Sequence[tuple]) -> Measure:
    """With the best of `settings`, further arguments of `run`, found on all sentences."""

    def measure(setting: tuple) -> Round:
        started = time.perf_counter()
        run(sentences, *setting)
        return {"work": len(sentences), "seconds": time.perf_counter() - started, "setting": setting}

    run(sentences[:100], *settings[0])  # whoever is first pays for what is made once
    chosen = best(settings, measure)
    return lambda number: measure(chosen)


# ---- two processes ----


def whole_run(options: argparse.Namespace, processes: int) -> Measure:
    """Work: target tokens of an epoch of scripts/train.py."""
    folder = Path(options.folder) / f"{os.getpid()}"
    threads = max(1, options.threads // processes)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
        launcher += ["--num_cpu_threads_per_process", str(threads), "--num_machines", "1"]
        launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    flags = ["--dataset_name", options.dataset_name, "--source_lang", "en", "--target_lang", "de", "--use_cpu", "true"]
    flags += ["--preset", TINY.preset, "--validation_split", "", "--eval_strategy", "no", "--save_strategy", "no"]
    flags += ["--num_train_epochs", "1", "--max_train_samples", "7250", "--report_to", "none"]
    flags += ["--max_tokens_per_batch", str(TINY.tokens // processes), "--logging_strategy", "no"]
    flags += ["--disable_tqdm", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def measure(number: int) -> Round:
        output = folder / str(number)
        command = [*launcher, str(ROOT / "scripts" / "train.py"), *flags, "--output_dir", str(output)]
        subprocess.run([*command, "--seed", str(number)], env=environment, check=True, stdout=subprocess.DEVNULL)
        record = json.loads((output / "run.json").read_text(encoding="utf-8"))
        return {"work": record["training"]["target_tokens"], "seconds": record["curve"][-1]["train_runtime"]}

    return measure


# ---- sections ----

MATRICES: Engines = {f"matrix products {dtype}": Engine(matrix_products, (dtype,)) for dtype in PRECISIONS}


def trainers(shape: Shape) -> Engines:
    names = [(name, dtype) for name in TRAINERS for dtype in PRECISIONS if (name, dtype) != ("joeynmt", "bfloat16")]
    if not importlib.util.find_spec("joeynmt"):
        names.remove(("joeynmt", "float32"))
    return {f"{name} {dtype}": Engine(training, (shape, name, PRECISIONS[dtype])) for name, dtype in names}


def steps(shape: Shape) -> Engines:
    return {**MATRICES, **{f"ours {dtype}": Engine(our_step, (shape, bf16)) for dtype, bf16 in PRECISIONS.items()}}


def large_steps(make: Callable[..., Measure], shape: Shape) -> Engines:
    names = [(name, dtype) for name in ("ours", CHECKPOINTED, "marian") for dtype in PRECISIONS]
    return {f"{name} {dtype}": Engine(make, (shape, name, PRECISIONS[dtype])) for name, dtype in names}


def translators(make: Callable[..., Measure], beams: int) -> Engines:
    names = [(name, dtype) for name in ("ours", WORKERS, "marian") for dtype in (*PRECISIONS, "int8")]
    names += [("ctranslate2", "float32"), ("ctranslate2", "int8")]
    return {f"{name} {dtype}": Engine(make, (name, dtype, beams)) for name, dtype in names}


def depths(symmetric: Shape, beams: int) -> Engines:
    shapes = {"symmetric": symmetric, "shallow": symmetric._replace(preset=SHALLOW[symmetric.preset])}
    return {
        f"{name} {dtype}": Engine(forced_translation, ("ours", dtype, beams, shape))
        for name, shape in shapes.items()
        for dtype in PRECISIONS
    }


SHAPES = (TINY, BASE)
SECTIONS: dict[str, Engines] = {
    "machine": {**MATRICES, "memory copy": Engine(memory_copy)},
    **{f"training, {shape.preset}": trainers(shape) for shape in SHAPES},
    **{f"one step, {shape.preset}": steps(shape) for shape in SHAPES},
    **{f"peak memory, {shape.preset}": large_steps(step_memory, shape) for shape in SHAPES},
    **{f"large step, {shape.preset}": large_steps(step_speed, shape) for shape in SHAPES},
    "translation, 5 beams": translators(translation, 5),
    "translation, 1 beam": translators(translation, 1),
    f"translation, paper-base, {LENGTH} tokens, 5 beams": translators(forced_translation, 5),
    f"translation, paper-base, {LENGTH} tokens, 1 beam": translators(forced_translation, 1),
    **{f"depth, {SHALLOW[shape.preset]}, 5 beams": depths(shape, 5) for shape in SHAPES},
    **{f"depth, {SHALLOW[shape.preset]}, 1 beam": depths(shape, 1) for shape in SHAPES},
    "two processes": {
        "one process": Engine(whole_run, (1,)),
        "two processes": Engine(whole_run, (2,)),
    },
}


def prepare(options: argparse.Namespace) -> None:
    """Learn the vocabulary of 10,000 and encode the training text, once for all engines."""
    words = ["--dataset_name", options.dataset_name, "--source_lang", "en", "--target_lang", "de"]
    _, data, tokenizer, _ = parse_arguments([*words, "--vocab_size", "10000", "--validation_split", ""])
    prepare_corpus(data, tokenizer, Path(options.folder) / "prepared")


def main() -> int:
    parser = argument_parser(__doc__, SECTIONS, RESULT)
    parser.epilog = "sections: " + "; ".join(SECTIONS)
    parser.add_argument("--dataset_name", required=True, help="a Multi30k folder")
    parser.add_argument("--model", help="what scripts/train.py left; for translation")
    parser.add_argument("--marian", help="a trained MarianMT, see above; for translation")
    parser.add_argument("--batch_tokens", type=int, help="of the Seq2SeqTrainers, instead of the best of three sizes")
    options = parser.parse_args()
    if not (options.model and options.marian) and {"translation, 5 beams", "translation, 1 beam"} & {*options.only}:
        parser.error("translation needs --model and --marian")
    with tempfile.TemporaryDirectory() as options.folder:
        prepare(options)
        measure_sections(options, SECTIONS)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"benchmark.py: {error}")
