"""The translation pipeline: what `pipeline("translation")` was until transformers 5 removed it.

This file travels to the Hub beside the weights, where `custom_pipelines` in config.json names it; where the package is
imported, the same class is the task "vanilla-translation". It uses no code of our model: any sequence-to-sequence
model translates with it that needs no language codes. A published copy outlives the transformers that it was written
for, hence only what transformers documents for pipelines of one's own is used.

Shapes: B batch, S source length, N translations of each text (`num_return_sequences`), T target length.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import Pipeline
from transformers.dynamic_module_utils import custom_object_save

from .errors import UserError

# Where neither the caller nor the model names a maximum, that of section 6.1: "input length + 50".
EXTRA_LENGTH = 50
LENGTHS = ("max_length", "max_new_tokens")


class VanillaTransformerTranslationPipeline(Pipeline):
    """Translate text: one text, a list, a dataset or an iterator.

        translator = pipeline("vanilla-translation", model=folder)
        translator("A dog runs.")                    # [{"translation_text": "..."}]
        translator(["A dog runs.", "A cat sleeps."], batch_size=2, num_beams=4)

    The search is that of the model's `generation_config`; arguments of `generate()` given here or in a call win over
    it, those of the call over those given here. An empty text stays empty.

    Args:
        model: a sequence-to-sequence model, in evaluation mode.
        tokenizer: the model's.
        device: such as "cuda:1" or "cpu"; None takes a GPU where there is one.
        batch_size: how many texts are translated at once; also an argument of the call.
        **options: those of `__call__`.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __call__(self, inputs: str | Iterable[str], **options: Any) -> Any:
        """
        Args:
            inputs: a text, a sequence of texts, or a dataset or iterator of texts.
            batch_size: how many texts are translated at once.
            return_text: whether the results hold `translation_text`; the default.
            return_tensors: whether they hold `translation_token_ids` (T), with the decoder's start token and padding.
            truncation: cut off what the model cannot read instead of refusing it.
            **options: any argument of `generate()`, such as `num_beams`, `max_length` or `num_return_sequences`.

        Returns:
            For a text a list of one dictionary for each translation. For a sequence a list in its order: of
            dictionaries, or of such lists where `num_return_sequences` is over 1. For a dataset or an iterator an
            iterator of such lists, which translates while it is read.

        Raises:
            UserError: something that is not text, a text that is longer than the model can read, nothing to return,
                or a language.
        """
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            inputs = list(inputs)
            if not inputs:
                return []
        elif isinstance(inputs, Iterator):
            inputs = (text for text in inputs)  # of all iterators, transformers knows generators alone
        results = super().__call__(inputs, **options)
        if isinstance(inputs, list) and all(len(translations) == 1 for translations in results):
            return [translation for [translation] in results]
        return results

    def _sanitize_parameters(
        self,
        return_text: bool | None = None,
        return_tensors: bool | None = None,
        truncation: bool | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_options: Any,
    ) -> tuple[dict, dict, dict]:
        """Sort the arguments into those of `preprocess`, of `_forward` and of `postprocess`."""
        if src_lang is not None or tgt_lang is not None:
            raise UserError(
                f"src_lang={src_lang!r}, tgt_lang={tgt_lang!r}: the model translates in one direction: leave them out"
            )
        reading = {"truncation": truncation}
        writing = {"return_text": return_text, "return_tensors": return_tensors}
        return _given(reading), generate_options, _given(writing)

    def preprocess(self, text: str, truncation: bool = False) -> dict[str, Tensor]:
        """Token ids and mask (1, S) of one text, and whether it `is_empty` (1)."""
        if not isinstance(text, str):
            raise UserError(
                f"cannot translate a {type(text).__name__}: give a text, a list or an iterator of texts, or the column "
                "of a dataset that holds them (transformers.pipelines.pt_utils.KeyDataset)"
            )
        limit = getattr(self.model.config, "max_position_embeddings", None)
        cut = {"truncation": truncation, "max_length": limit} if truncation else {}
        encoded = self.tokenizer(text, return_tensors="pt", **cut)
        length = encoded["input_ids"].shape[1]
        if limit is not None and length > limit:
            raise UserError(
                f"{length} tokens, but the model reads at most {limit} (max_position_embeddings): split the text into "
                f"sentences, or cut it off with truncation=True: {text[:40]!r}..."
            )
        return {**encoded, "is_empty": torch.tensor([not text.strip()])}

    def _forward(self, batch: dict[str, Tensor], **generate_options: Any) -> dict[str, Tensor]:
        """Token ids (B, N, T) of the translations."""
        is_empty = batch.pop("is_empty")
        rows, source_length = batch["input_ids"].shape
        output = self.model.generate(**batch, **self._maximum(source_length, generate_options), **generate_options)
        sequences = getattr(output, "sequences", output)
        sequences = sequences.reshape(rows, -1, sequences.shape[-1])
        sequences[is_empty, :, 1:] = self.tokenizer.pad_token_id
        return {"output_ids": sequences}

    def _maximum(self, source_length: int, options: dict[str, Any]) -> dict[str, int]:
        """The maximum length of the translations, if nothing else says it."""
        named_by_caller = {*LENGTHS, "generation_config"} & options.keys()
        if named_by_caller or any(getattr(self.model.generation_config, name) for name in LENGTHS):
            return {}
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = source_length + EXTRA_LENGTH
        return {"max_length": min(longest, limit or longest)}

    def postprocess(
        self, outputs: dict[str, Tensor], return_text: bool = True, return_tensors: bool = False
    ) -> list[dict[str, Any]]:
        """The N results for one text, from its token ids (1, N, T)."""
        if not (return_text or return_tensors):
            raise UserError("return_text=False leaves nothing to return: add return_tensors=True")
        results: list[dict[str, Any]] = []
        for ids in outputs["output_ids"][0]:
            text = {"translation_text": self.tokenizer.decode(ids, skip_special_tokens=True)} if return_text else {}
            results.append({**({"translation_token_ids": ids} if return_tensors else {}), **text})
        return results

    def save_pretrained(self, save_directory: str | PathLike, **kwargs: Any) -> None:
        """Save the model and the tokenizer; this code too where config.json names it, as in a published folder."""
        if getattr(self.model.config, "custom_pipelines", None):
            os.makedirs(save_directory, exist_ok=True)
            custom_object_save(self, save_directory)  # first: the model looks whether it is there
        super().save_pretrained(save_directory, **kwargs)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Without what the caller left out, which must not hide what was given when the pipeline was made."""
    return {name: value for name, value in options.items() if value is not None}


__all__ = ["VanillaTransformerTranslationPipeline"]
