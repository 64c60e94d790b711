"""The floor: a MarianMT of the same shape, trained with transformers' own Seq2SeqTrainer on the same recipe.

Same text, tokenizer, sizes, optimiser, schedule, label smoothing and number of epochs; everything else is what
transformers does by itself: batches of a fixed number of sentences grouped by length, the Trainer's own label
smoother, the last weights. `vanilla-transformer evaluate` scores the result.

    python scripts/train_marian.py scripts/recipes/multi30k_en_de_tiny.yaml --dataset_name <folder> --output_dir <out>
"""

import sys
import time
from pathlib import Path

import numpy as np
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.arguments import parse_arguments, parse_overrides
from hf_vanilla_transformer.checkpoints import checkpoint_to_resume
from hf_vanilla_transformer.corpus import source_description
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.preparation import PreparedCorpus, prepare_corpus, token_lengths
from hf_vanilla_transformer.provenance import RUN_RECORD, provenance, write_record


def marian_like(config: VanillaTransformerConfig) -> MarianMTModel:
    """A MarianMT with the sizes of `config`, the paper's activation, and an initialisation that suits its scale."""
    sizes = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")]
    same = [*sizes, "vocab_size", "d_model", "dropout", "activation_function", "max_position_embeddings"]
    special = ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"]
    model = MarianMTModel(
        MarianConfig(
            **{name: getattr(config, name) for name in [*same, *special]},
            scale_embedding=True,
            init_std=config.d_model**-0.5,
            forced_eos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(
        **{name: getattr(config, name) for name in special}, max_length=128, num_beams=5, early_stopping=True
    )
    return model


def main(argv: list[str]) -> None:
    model_args, data, tokenizer_options, ours = parse_arguments(argv)
    if ours.muon or ours.lr_scheduler_type != "inverse_sqrt" or data.synthetic_file or data.directions:
        raise UserError("the floor is trained with AdamW, inverse_sqrt and real text only: take another recipe")
    for name in ("rdrop_alpha", "simcut_alpha", "early_stopping_patience", "ema_decay"):
        if getattr(ours, name):
            raise UserError(f"the floor has no {name}: take another recipe")
    if tokenizer_options.subword_dropout:
        raise UserError("the floor has no subword_dropout: take another recipe")
    output = Path(ours.output_dir)
    origin = provenance()
    checkpoint = checkpoint_to_resume(output, ours.resume_from_checkpoint, ours.world_size)
    prepare_corpus(data, tokenizer_options, output / "prepared")
    corpus = PreparedCorpus.load(output / "prepared")
    config = VanillaTransformerConfig.preset(
        model_args.preset, vocab_size=len(corpus.tokenizer), **parse_overrides(model_args.config_overrides)
    )
    set_seed(ours.seed)
    model = marian_like(config)
    longest = np.maximum(*token_lengths(corpus.train))
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(output),
            num_train_epochs=ours.num_train_epochs,
            max_steps=ours.max_steps,
            gradient_accumulation_steps=ours.gradient_accumulation_steps,
            per_device_train_batch_size=int(ours.max_tokens_per_batch / longest.mean()),
            train_sampling_strategy="group_by_length",
            learning_rate=ours.learning_rate,
            lr_scheduler_type="inverse_sqrt",
            warmup_steps=ours.warmup_steps,
            adam_beta1=ours.adam_beta1,
            adam_beta2=ours.adam_beta2,
            adam_epsilon=ours.adam_epsilon,
            weight_decay=ours.weight_decay,
            max_grad_norm=ours.max_grad_norm,
            label_smoothing_factor=ours.label_smoothing_factor,
            bf16=ours.bf16,
            save_strategy="epoch",
            save_total_limit=2,
            logging_steps=100,
            seed=ours.seed,
            use_cpu=ours.use_cpu,
            dataloader_pin_memory=False,
        ),
        data_collator=DataCollatorForSeq2Seq(corpus.tokenizer, model=model),
        train_dataset=corpus.train,
        processing_class=corpus.tokenizer,
    )
    started = time.time()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    record = {
        **origin,
        "seed": ours.seed,
        "source_lang": data.source_lang,
        "target_lang": data.target_lang,
        "data": {
            "description": source_description(data.train_file, data.dataset_name, data.dataset_config_name),
            "report": corpus.report,
        },
        "parameters": model.num_parameters(),
        "training": {
            "seconds": round(time.time() - started, 1),
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
        },
        "curve": trainer.state.log_history,
    }
    write_record(record, output / RUN_RECORD)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"train_marian.py: {error}")
