"""How far imported and exported models agree with the models that they come from and go to.

python scripts/agreement.py          print the table and write scripts/results/agreement.json
python scripts/agreement.py --check  say whether each row still keeps the promise (exit status 1 if not)

Each row takes models with random weights, norms and biases included, on random sentences with padding: the largest
difference between two logits, and how many of the beams are the same tokens. The references are the independent twins
of tests/, transformers' MarianMTModel and torch.nn.Transformer.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, MarianConfig, MarianMTModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interchange import FORMATS, export_model, import_model
from hf_vanilla_transformer.provenance import provenance
from hf_vanilla_transformer.weight_layout import LayoutOptions
from results_table import agreement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import teaching_twins as teaching  # noqa: E402
from reference_twins import (  # noqa: E402
    FairseqTransformer,
    TutorialTransformer,
    beam_search,
    fairseq_settings,
    shake,
)

RESULT = ROOT / "scripts" / "results" / "agreement.json"
SEEDS, SENTENCES, LENGTH, BEAMS = (0, 1, 2), 8, 12, 4
SOURCE_VOCABULARY, VOCABULARY, WIDTH, HEADS = 23, 29, 32, 4
PROMISED = 1e-5
Logits = Callable[[Tensor, Tensor], Tensor]
# What our models need to be expressible in a format, beside the defaults.
EXPRESSIBLE = {
    "annotated": {"norm_position": "pre", "layer_norm_eps": 1e-6},
    "hyunwoongko": {"layer_norm_eps": 1e-12},
    "keras": {"layer_norm_eps": 1e-6},
    "keras-interleaved": {"layer_norm_eps": 1e-6},
}


def sentences(seed: int, padding: int, special: set[int]) -> tuple[Tensor, Tensor]:
    """Source (B, S) with padding at the end, and target prefixes (B, T) without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.tensor([number for number in range(SOURCE_VOCABULARY) if number not in {*special, padding}])
    source = words[torch.randint(len(words), (SENTENCES, LENGTH), generator=generator)]
    lengths = torch.randint(3, LENGTH + 1, (SENTENCES, 1), generator=generator)
    target = words[torch.randint(len(words), (SENTENCES, LENGTH), generator=generator)]
    return source.masked_fill(torch.arange(LENGTH) >= lengths, padding), target


@torch.no_grad()
def compare(model: VanillaTransformerForConditionalGeneration, twin: Logits, seed: int) -> tuple[float, int, int]:
    """The largest difference of two logits, equal beams, beams."""
    config = model.config
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {name: getattr(config, name) for name in ids}
    source, target = sentences(seed, config.pad_token_id, set(ids.values()))
    difference = (model(source, decoder_input_ids=target).logits - twin(source, target)).abs().max().item()
    search = GenerationConfig(
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        max_length=LENGTH + 4,
        early_stopping=True,
        suppress_tokens=[config.pad_token_id],
        **ids,
    )
    found = model.generate(source, generation_config=search).tolist()
    expected = beam_search(twin, source, search, config.vocab_size)
    return difference, sum(map(list.__eq__, found, expected)), len(expected)


# ---- references -> ours ----


def marian_logits(model: MarianMTModel, source: Tensor, target: Tensor) -> Tensor:
    mask = source.ne(model.config.pad_token_id).long()
    return model(source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


def imported_marian(seed: int, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, Logits]:
    """As OPUS-MT: padding is the last token and starts the decoder, swish, a bias on the logits."""
    torch.manual_seed(seed)
    config = MarianConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, scale_embedding=True,
        activation_function="swish", max_position_embeddings=64, pad_token_id=VOCABULARY - 1, eos_token_id=0,
        decoder_start_token_id=VOCABULARY - 1, forced_eos_token_id=None,
    )  # fmt: skip
    model = shake(MarianMTModel(config))
    model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return import_model(folder, "marian"), partial(marian_logits, MarianMTModel.from_pretrained(folder).eval())


def imported_torch(seed: int, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, Logits]:
    torch.manual_seed(seed)
    shape = {"d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 48}
    twin = shake(TutorialTransformer(SOURCE_VOCABULARY, VOCABULARY, **shape))
    torch.save(twin.state_dict(), folder / "weights.pt")
    return import_model(folder, "torch", LayoutOptions(num_heads=HEADS)), twin


def imported_fairseq(seed: int, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, Logits]:
    torch.manual_seed(seed)
    twin = shake(FairseqTransformer(fairseq_settings(), SOURCE_VOCABULARY, VOCABULARY))
    checkpoint = {"args": argparse.Namespace(**fairseq_settings()), "model": twin.state_dict()}
    torch.save(checkpoint, folder / "checkpoint.pt")
    return import_model(folder, "fairseq"), twin


def imported_teaching(name: str, seed: int, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, Logits]:
    weights = teaching.WEIGHTS[name](seed)
    torch.save({key: torch.as_tensor(value) for key, value in weights.items()}, folder / "weights.pt")
    twin = partial(teaching.LOGITS[name], weights, teaching.HEADS, teaching.PADDING[name])
    return import_model(folder, name, teaching.OPTIONS[name]), twin


IMPORTS = {"marian": imported_marian, "torch": imported_torch, "fairseq": imported_fairseq}


# ---- ours -> references ----


def own_model(name: str, seed: int) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "encoder_vocab_size": SOURCE_VOCABULARY,
        "share_encoder_decoder_embeddings": False,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "pad_token_id": teaching.PADDING.get(name, 1),
        "unk_token_id": 0,
        "bos_token_id": 4,
        "decoder_start_token_id": 4,
        **EXPRESSIBLE.get(name, {}),
    }
    return shake(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **settings)))


def exported(name: str, seed: int, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, Logits]:
    model = own_model(name, seed)
    config = model.config
    path = folder / "folder" if name == "marian" else folder / "weights.pt"
    export_model(model, name, path)
    if name == "marian":
        return model, partial(marian_logits, MarianMTModel.from_pretrained(path).eval())
    with torch.serialization.safe_globals([argparse.Namespace]):
        weights = torch.load(path, weights_only=True)
    if name == "torch":
        twin = TutorialTransformer(
            SOURCE_VOCABULARY, VOCABULARY, padding=config.pad_token_id, final_norms=False, d_model=WIDTH, nhead=HEADS,
            num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48,
        )  # fmt: skip
        twin.load_state_dict(weights)
        return model, twin
    if name == "fairseq":
        twin = FairseqTransformer(vars(weights["args"]), SOURCE_VOCABULARY, VOCABULARY, padding=config.pad_token_id)
        twin.load_state_dict(weights["model"])
        return model, twin
    if name.startswith("keras"):
        weights = {key: value.numpy() for key, value in weights.items()}
    return model, partial(teaching.LOGITS[name], weights, HEADS, config.pad_token_id)


# ---- the table ----


def rows() -> Iterator[dict]:
    """One for each format and direction."""
    for name in FORMATS:
        makers = {"import": IMPORTS.get(name, partial(imported_teaching, name)), "export": partial(exported, name)}
        for direction, make in makers.items():
            results = []
            for seed in SEEDS:
                with tempfile.TemporaryDirectory() as folder:
                    results.append(compare(*make(seed, Path(folder)), seed))
            differences, equal, beams = zip(*results, strict=True)
            yield {
                "reference": name,
                "direction": direction,
                "max_logit_difference": max(differences),
                "equal_beams": sum(equal),
                "beams": sum(beams),
            }


def kept(row: dict) -> bool:
    return row["max_logit_difference"] <= PROMISED and row["equal_beams"] == row["beams"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a row breaks the promise")
    check = parser.parse_args().check
    disable_progress_bar()
    set_verbosity_error()
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    found = list(rows())
    print(agreement(found))
    if check:
        return int(not all(map(kept, found)))
    settings = {"seeds": SEEDS, "sentences": SENTENCES, "length": LENGTH, "num_beams": BEAMS}
    record = {"provenance": provenance(), "settings": settings, "rows": found}
    RESULT.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
