"""How fast we train and translate beside the peers, and beside what the machine can do.

    python scripts/benchmark.py --dataset_name <multi30k folder> --model <trained folder> --marian <trained folder>

Every engine lives in a process of its own, so that nobody's threads disturb another. The processes take turns, round by
round, after one round of warm-up; printed and written to scripts/results/benchmark.json are medians, with the least and
the greatest.

- **training**: one optimiser step (forward, backward, clipping, fused AdamW) of `multi30k-tiny` on batches of Multi30k,
  label smoothing 0.1; target tokens a second, padding not counted. Ours has batches by token budget, MarianMT
  transformers' batches of a fixed size grouped by length, with the label smoother of Seq2SeqTrainer.
- **translation**: test set 2016 with the trained models of scripts/train.py and scripts/train_marian.py; sentences a
  second through `translate`, CTranslate2 with its own batching.
- **machine**: floating-point operations a second of products of 1024 x 1024 matrices.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "scripts" / "results" / "benchmark.json"
RECIPE = ROOT / "scripts" / "recipes" / "multi30k_en_de_tiny.yaml"
STEPS = 16  # training steps of a round
Measure = Callable[[], tuple[float, float]]  # one round: work done, seconds


# ---- the engines; each function runs in a process of its own ----


def matrix_products(options: argparse.Namespace, dtype: str) -> Measure:
    """Work: floating-point operations."""
    import torch

    a, b = (torch.randn(1024, 1024).to(getattr(torch, dtype)) for _ in range(2))

    def measure() -> tuple[float, float]:
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        return 10 * 2 * 1024**3, time.perf_counter() - started

    return measure


def training(options: argparse.Namespace, kind: str, bf16: bool) -> Measure:
    """Work: target tokens, padding not counted."""
    import torch
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    model, batches = _our_training(options) if kind == "ours" else _marian_training(options)
    optimizer, smoother = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True), LabelSmoother(0.1)

    def step(batch: dict[str, Any]) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if kind == "ours":
                loss = model(**batch).loss
            else:  # as Seq2SeqTrainer does: the model does not see the labels
                inputs = {name: values for name, values in batch.items() if name != "labels"}
                loss = smoother(model(**inputs), batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def measure() -> tuple[float, float]:
        tokens, seconds = 0, 0.0
        for batch in islice(batches, STEPS):
            started = time.perf_counter()
            step(batch)
            seconds += time.perf_counter() - started
            tokens += int(batch["labels"].ne(-100).sum())
        return tokens, seconds

    return measure


def _corpus(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The prepared text, the training arguments of the recipe, the configuration of the model."""
    from hf_vanilla_transformer import VanillaTransformerConfig
    from hf_vanilla_transformer.arguments import parse_arguments, parse_overrides
    from hf_vanilla_transformer.preparation import PreparedCorpus, prepare_corpus

    folder = str(Path(options.folder) / f"{os.getpid()}")
    model_args, data, tokenizer_options, args = parse_arguments(
        [str(RECIPE), "--dataset_name", options.dataset_name, "--output_dir", folder]
    )
    prepare_corpus(data, tokenizer_options, Path(folder) / "prepared")
    corpus = PreparedCorpus.load(Path(folder) / "prepared")
    overrides = parse_overrides(model_args.config_overrides)
    config = VanillaTransformerConfig.preset(model_args.preset, vocab_size=len(corpus.tokenizer), **overrides)
    return corpus, args, config


def _our_training(options: argparse.Namespace) -> tuple[Any, Any]:
    import numpy as np

    from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
    from hf_vanilla_transformer.batching import PairCollator, TokenBatchSampler, TrainingPairs
    from hf_vanilla_transformer.preparation import token_lengths

    corpus, args, config = _corpus(options)
    sampler = TokenBatchSampler(np.maximum(*token_lengths(corpus.train)), args.max_tokens_per_batch, seed=1)
    pairs = TrainingPairs(corpus.train.select_columns(["input_ids", "labels"]))
    collate = PairCollator(config.pad_token_id)
    batches = [collate(pairs.__getitems__(keys)) for keys in islice(sampler, 4 * STEPS)]
    return VanillaTransformerForConditionalGeneration(config), cycle(batches)


def _marian_training(options: argparse.Namespace) -> tuple[Any, Any]:
    import numpy as np
    from transformers import DataCollatorForSeq2Seq
    from transformers.trainer_pt_utils import LengthGroupedSampler

    from hf_vanilla_transformer.preparation import token_lengths
    from train_marian import marian_like

    corpus, args, config = _corpus(options)
    model = marian_like(config)
    longest = np.maximum(*token_lengths(corpus.train))
    size = int(args.max_tokens_per_batch / longest.mean())
    order = list(LengthGroupedSampler(size, lengths=longest.tolist()))
    collate = DataCollatorForSeq2Seq(corpus.tokenizer, model=model)
    pairs = corpus.train.select_columns(["input_ids", "labels"])
    starts = range(0, len(order) - size, len(order) // (4 * STEPS))  # all lengths, not only the longest
    batches = [collate([pairs[row] for row in order[start : start + size]]) for start in starts]
    return model, cycle([dict(batch.items()) for batch in batches])


def translation(options: argparse.Namespace, engine: str, dtype: str, beams: int) -> Measure:
    """Work: sentences."""
    from hf_vanilla_transformer.corpus import read_pairs
    from hf_vanilla_transformer.translation import load_model, translate

    pairs = read_pairs(dataset=options.dataset_name, split="test_2016_flickr", source_lang="en", target_lang="de")
    sentences = [pair.source for pair in pairs]
    if engine == "ctranslate2":
        from hf_vanilla_transformer.ctranslate2_export import CTranslate2Engine, export_ctranslate2

        folder = export_ctranslate2(*load_model(options.model), Path(options.folder) / f"{os.getpid()}", dtype)
        ctranslate2 = CTranslate2Engine(folder, threads=options.threads)

        def run() -> None:
            ctranslate2.translate_nbest(sentences, num_beams=beams)
    else:
        model, tokenizer = load_model(options.model if engine == "ours" else options.marian, dtype=dtype)

        def run() -> None:
            translate(model, tokenizer, sentences, num_beams=beams)

    def measure() -> tuple[float, float]:
        started = time.perf_counter()
        run()
        return len(sentences), time.perf_counter() - started

    return measure


# ---- taking turns ----

ENGINES: dict[str, dict[str, tuple[Callable[..., Measure], tuple]]] = {
    "machine": {dtype: (matrix_products, (dtype,)) for dtype in ("float32", "bfloat16")},
    "training": {
        f"{kind} {'bfloat16' if bf16 else 'float32'}": (training, (kind, bf16))
        for kind in ("ours", "marian")
        for bf16 in (False, True)
    },
    **{
        f"translation, {beams} beam{'s' * (beams > 1)}": {
            f"{engine} {dtype}": (translation, (engine, dtype, beams))
            for engine, dtypes in {
                "ours": ("float32", "bfloat16"),
                "marian": ("float32", "bfloat16"),
                "ctranslate2": ("float32", "int8"),
            }.items()
            for dtype in dtypes
        }
        for beams in (5, 1)
    },
}


def work(options: argparse.Namespace, make: Callable[..., Measure], arguments: tuple, pipe: Any) -> None:
    """A process: prepares itself, then measures a round whenever it is asked to."""
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(options.threads)
    measure = make(options, *arguments)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(measure())


def rates(options: argparse.Namespace, engines: dict[str, tuple]) -> dict[str, list[float]]:
    """Work a second of each engine in each round; the engines take turns."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, (make, arguments) in engines.items():
        pipes[name], other = context.Pipe()
        processes.append(context.Process(target=work, args=(options, make, arguments, other), daemon=True))
        processes[-1].start()
        other.close()  # or a process that ends too early would be waited for without end
        pipes[name].recv()  # one after the other, so that a round is not measured while somebody prepares himself
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds + 1):
        for name, pipe in pipes.items():
            pipe.send(True)
            done, seconds = pipe.recv()
            found[name].append(done / seconds)
    for pipe in pipes.values():
        pipe.send(False)
    return {name: values[1:] for name, values in found.items()}


def table(sections: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a row for each engine, with its ratio to the best of MarianMT."""
    lines = ["| what | engine | median a second | least to greatest | × MarianMT |", "|---|---|---|---|---|"]
    for section, engines in sections.items():
        peers = [statistics.median(values) for name, values in engines.items() if name.startswith("marian")]
        for name, values in engines.items():
            median = statistics.median(values)
            ratio = f"{median / max(peers):.2f}" if peers else ""
            lines.append(f"| {section} | {name} | {median:,.4g} | {min(values):,.4g} to {max(values):,.4g} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_name", required=True, help="a Multi30k folder")
    parser.add_argument("--model", required=True, help="what scripts/train.py left")
    parser.add_argument("--marian", required=True, help="what scripts/train_marian.py left")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="these sections; no record")
    options = parser.parse_args()
    from hf_vanilla_transformer.provenance import provenance

    record: dict[str, Any] = {**provenance(), "threads": options.threads, "sections": {}}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        for section in options.only:
            record["sections"][section] = rates(options, ENGINES[section])
            print(table({section: record["sections"][section]}), flush=True)
    if options.only == list(ENGINES):
        RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
