"""Training: a thin `Seq2SeqTrainer`, and the function behind `train`.

Training and evaluation meet only through the saved folder; the score of the validation set comes in from outside.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    EarlyStoppingCallback,
    EvalPrediction,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerCallback,
    get_inverse_sqrt_schedule,
    set_seed,
)

from .arguments import Arguments, DataArguments, ModelArguments, TrainingArguments, idle_options, parse_overrides
from .averaging import ExponentialMovingAverage, average_checkpoints
from .batching import EpochLoader, PairCollator, TokenBatchSampler, TrainingPairs
from .checkpoints import checkpoint_to_resume, complete_checkpoints, evaluations_in_vain, steps_of
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .consistency import TwoPasses, rdrop, simcut
from .corpus import source_description
from .errors import UserError, on_one_line
from .loss import IGNORED
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .muon import MuonWithAdamW
from .preparation import PreparedCorpus, is_prepared, prepare_corpus, token_lengths
from .provenance import EVALUATION_RECORD, RUN_RECORD, provenance, read_record, without_folders, write_record
from .tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    SubwordDropout,
    backends,
    load_tokenizer,
    require_fit,
    same_tokenizer,
    writes_lower_case,
)
from .weight_files import load_own_model, require_folder_or_hub_id

METRICS = ("bleu", "chrf", "loss")
# Options that say where a run is, or that transformers fills in from others: not part of a recipe.
FILLED_IN = ("output_dir", "resume_from_checkpoint", "greater_is_better", "do_eval")
Scorer = Callable[[list[str], list[str]], dict[str, float]]


def paper_learning_rate(d_model: int, warmup_steps: float) -> float:
    """The peak of section 5.3, equation 3: d_model^-0.5 * warmup_steps^-0.5, reached after the warm-up."""
    return (d_model * warmup_steps) ** -0.5


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What transformers and PyTorch refuse of the options is a mistake of the user."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(on_one_line(error)) from error


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with batches by token budget, an optional moving average, and evaluations that leave no trace.

    Each line of the log has the `seconds` of training up to it, over all pieces of a run that was resumed. Consistency
    training, where it is wished, shows its divergence per target token there as `consistency`.

    Args:
        train_lengths: tokens of the longer side of each training pair.
        eval_max_length: where translations of the validation set are cut off, in tokens.

    Raises:
        UserError: consistency training in one process for several GPUs.
    """

    def __init__(self, *args: Any, train_lengths: Sequence[int], eval_max_length: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.train_lengths = train_lengths
        self.eval_max_length = eval_max_length
        self.started, self.earlier_seconds = time.time(), None
        self.ema = None
        if self.args.ema_decay:
            self.ema = ExponentialMovingAverage(self.model, self.args.ema_decay)
            self.add_callback(_UpdateAverage(self.ema))
        self.two_passes = None
        if self.args.rdrop_alpha:
            self.two_passes = TwoPasses(rdrop(self.args.rdrop_alpha))
        elif self.args.simcut_alpha:
            self.two_passes = TwoPasses(simcut(self.args.simcut_alpha, self.args.simcut_p))
        if self.two_passes and self.args.n_gpu > 1:  # each would get rows of one pair without the other
            raise UserError("consistency training on several GPUs needs a process for each: use accelerate launch")

    def get_train_dataloader(self) -> EpochLoader:
        args = self.args
        sampler = TokenBatchSampler(
            self.train_lengths,
            max_tokens=args.max_tokens_per_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            world_size=args.world_size,
            accumulation=args.gradient_accumulation_steps,
        )
        return EpochLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )

    @_in_one_line()
    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.args.muon and self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = MuonWithAdamW(
                self.model,
                undecayed={name for name, _ in self.model.named_parameters()} - decayed,
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """transformers counts steps from 0, equation 3 from 1: the first step would have a learning rate of zero."""
        if self.args.lr_scheduler_type == "inverse_sqrt" and self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
            warmup = self.args.get_warmup_steps(num_training_steps)
            options = self.args.lr_scheduler_kwargs or {}
            self.lr_scheduler = get_inverse_sqrt_schedule(optimizer, warmup, **options, last_epoch=0)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        if not (self.two_passes and model.training and self.state.global_step >= self.args.consistency_start):
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self.two_passes.applied(self.model, inputs) as doubled:
            return super().compute_loss(model, doubled, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any):
        if self.two_passes and "loss" in logs:
            totals = self.two_passes.totals().to(self.args.device)
            divergence, tokens = self.accelerator.reduce(totals, "sum").tolist()
            if tokens:
                logs["consistency"] = divergence / tokens
        logs["seconds"] = round(self.seconds(), 1)
        logs.pop("train_samples_per_second", None)  # wrong where there are max_steps: batches have no fixed size
        super().log(logs, *args, **kwargs)

    def seconds(self) -> float:
        """Since the start, with those that a checkpoint to go on from had taken when it was last in the log."""
        if self.earlier_seconds is None:  # only now it has been loaded
            self.earlier_seconds = max((entry.get("seconds", 0.0) for entry in self.state.log_history), default=0.0)
        return self.earlier_seconds + time.time() - self.started

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the averaged weights where there are any; training goes on as if there had been no evaluation.

        transformers writes its own defaults into `generation_config` while it evaluates, and they would end up in
        the checkpoint; each pass over a data loader draws a random number.
        """
        kept = self.model.generation_config
        random_state = torch.get_rng_state()
        beams = self.args.eval_num_beams
        self.model.generation_config = deepcopy(kept)
        self.model.generation_config.update(
            num_beams=beams,
            early_stopping=beams > 1,
            length_penalty=self.args.length_penalty if beams > 1 else 1.0,
            length_penalty_type=self.args.length_penalty_type if beams > 1 else "average",
            max_length=self.eval_max_length,
        )
        try:
            with self.ema.applied() if self.ema else nullcontext():
                return super().evaluate(*args, num_beams=beams, max_length=self.eval_max_length, **kwargs)
        finally:
            self.model.generation_config = kept
            torch.set_rng_state(random_state)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        """The loss per target token, as in training: transformers gives the mean of its means over batches."""
        self.evaluated = torch.zeros(2, device=self.args.device)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, tokens = self.accelerator.reduce(self.evaluated, "sum").tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = total / tokens
        return output

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        loss, *predicted = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            tokens = inputs["labels"].ne(IGNORED).sum().to(loss.device)
            self.evaluated += torch.stack([loss.float() * tokens, tokens])
        return loss, *predicted

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        settings = set(self.optimizer.param_groups[0])
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            if missing := settings - set(self.optimizer.param_groups[0]):
                raise ValueError(f"without {', '.join(sorted(missing))}")
        except ValueError as error:
            raise UserError(
                f"the optimizer in {checkpoint} is another one ({on_one_line(error)}): "
                "resume with the --muon and the --optim that it began with"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None):
        super()._save(output_dir, state_dict)
        if self.ema and self.args.should_save:
            self.ema.save(Path(output_dir or self.args.output_dir))

    def _load_callback_state(self):
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):  # it has the patience that the run began with
                callback.early_stopping_patience = self.args.early_stopping_patience

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.ema:
            if not (Path(resume_from_checkpoint) / self.ema.FILE).is_file():
                raise UserError(f"{resume_from_checkpoint} has no moving average: resume without --ema_decay")
            self.ema.load(Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any):
        """Tied weights are stored once, under whichever name: their other names are not missing."""
        tied = self.model.all_tied_weights_keys
        missing = set(load_result.missing_keys)
        loaded = {tied.get(name, name) for name in self.model.state_dict().keys() - missing}
        if any(tied.get(name, name) not in loaded for name in missing) or load_result.unexpected_keys:
            super()._issue_warnings_after_load(load_result)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any):
        with self.saving(f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Writing fails with one line that names the last complete checkpoint."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            folder = Path(self.args.output_dir)
            complete = complete_checkpoints(folder, self.args.world_size)
            kept = f"{complete[-1]} is complete: resume from it" if complete else "no earlier checkpoint is complete"
            raise UserError(f"saving {folder}/{what} failed ({on_one_line(error)}); {kept}") from error


class _UpdateAverage(TrainerCallback):
    def __init__(self, ema: ExponentialMovingAverage):
        self.ema = ema

    def on_step_end(self, args, state, control, **kwargs):
        self.ema.update(state.global_step)


def train(arguments: Arguments, score: Scorer | None = None) -> Path:
    """The main job: parallel text in, a trained model, its tokenizer and the record of the run in `output_dir`.

    Args:
        arguments: from `parse_arguments`.
        score: hypotheses and references -> named scores such as {"bleu": 31.2}; for the validation set.

    Returns:
        `output_dir`.

    Raises:
        UserError: anything about the input that the person who started this can mend.
    """
    model_args, data, tokenizer_options, args = arguments
    origin = provenance(device=args.device)  # now: the source tree may change while this runs
    recipe = _recipe(arguments)
    checkpoint = checkpoint_to_resume(Path(args.output_dir), args.resume_from_checkpoint, args.world_size)
    output = Path(args.output_dir)
    prepared = output / "prepared"
    _configuration(arguments, {})  # a mistake in it should not cost the preparation of the corpus
    _require_directions(model_args, data)
    with args.main_process_first(local=False, desc="preparing the corpus"):
        if args.process_index == 0:
            idle = [f"no effect: {', '.join(names)}: {why}" for why, names in idle_options(*arguments[:3]).items()]
            prepare_corpus(data, tokenizer_options, prepared, model_args.model_name_or_path, idle)
        elif not is_prepared(prepared):
            raise SystemExit(1)  # the first process says why
        corpus = PreparedCorpus.load(prepared)
    if checkpoint and not same_tokenizer(corpus.tokenizer, load_tokenizer(checkpoint)):
        raise UserError(f"the text or the tokenizer is not that of {checkpoint}: resume with what it was made from")
    set_seed(args.seed)
    model = _build_model(arguments, corpus.tokenizer)
    if checkpoint:
        _require_same_model(checkpoint, model.config)
    _require_positions(corpus.validation, model.config)
    _settle_arguments(args, corpus, model.config, scored=score is not None)
    source_lengths, target_lengths = token_lengths(corpus.train)
    with _in_one_line():
        trainer = VanillaTransformerTrainer(
            model=model,
            args=args,
            data_collator=PairCollator(model.config.pad_token_id),
            train_dataset=_training_pairs(corpus, tokenizer_options.subword_dropout, args.seed, model.config),
            eval_dataset=corpus.validation,
            processing_class=corpus.tokenizer,
            compute_metrics=_text_metrics(corpus, args, score),
            callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else [],
            train_lengths=np.maximum(source_lengths, target_lengths),
            eval_max_length=_eval_max_length(corpus, model.generation_config.max_length),
        )
    _announce(trainer, model, checkpoint)
    if checkpoint and _is_the_end(checkpoint, args):
        args.max_steps, args.num_train_epochs = -1, 0  # the Trainer would go on
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    chosen = _finish_weights(trainer, output)
    with trainer.saving("model.safetensors"):
        (output / EVALUATION_RECORD).unlink(missing_ok=True)  # scores of the weights that are replaced here
        trainer.save_model()
    if args.process_index == 0:
        print(f"weights of the result: {chosen}", flush=True)
        record = {
            **origin,
            "seed": args.seed,
            "source_lang": data.source_lang,
            "target_lang": data.target_lang,
            "data": {
                "description": _description(data),
                "before": _data_before(model_args.model_name_or_path),
                "dataset": None if Path(data.dataset_name or ".").expanduser().exists() else data.dataset_name,
                "config": data.dataset_config_name if data.dataset_name else None,
                "report": corpus.report,
            },
            "recipe": recipe,
            "parameters": model.num_parameters(),
            "training": {
                "seconds": round(trainer.seconds(), 1),
                "steps": trainer.state.global_step,
                "epochs": trainer.state.epoch,
                "target_tokens": int(target_lengths.sum() * trainer.state.epoch),
                "weights": chosen,
                "resumed_from": checkpoint.name if checkpoint else None,
            },
            "curve": trainer.state.log_history,
        }
        write_record(record, output / RUN_RECORD)
        shutil.rmtree(prepared)
    return output


def _require_same_model(checkpoint: Path, config: VanillaTransformerConfig) -> None:
    """Raises UserError where a run would go on as another model than it began with."""
    began = VanillaTransformerConfig.from_pretrained(checkpoint)
    for name in VanillaTransformerConfig.__annotations__:
        if name == "use_cache":  # which training switches off
            continue
        if (old := getattr(began, name)) != (new := getattr(config, name)):
            raise UserError(
                f"{checkpoint} has {name}={old}, this run {new}: resume with the model that it began with, or go on "
                f"from it as a new run with --model_name_or_path {checkpoint} and another --output_dir"
            )


def _is_the_end(checkpoint: Path, args: TrainingArguments) -> bool:
    """Whether a run has done all its steps with this checkpoint, or has run out of patience."""
    stopped = 0 < args.early_stopping_patience <= evaluations_in_vain(checkpoint)
    return stopped or 0 < args.max_steps <= steps_of(checkpoint)


def _description(data: DataArguments) -> str:
    description = source_description(data.train_file, data.dataset_name, data.dataset_config_name)
    if data.synthetic_file:
        description += f", and back-translations: {source_description(data.synthetic_file, None, None)}"
    return f"{description}. {data.data_description}" if data.data_description else description


def _data_before(model: str | None) -> list[str]:
    """What the model that training goes on from was trained on, first to last; empty where no record says it."""
    data = read_record(Path(model) / RUN_RECORD).get("data", {}) if model else {}
    return [*data.get("before", []), data["description"]] if "description" in data else []


def _configuration(arguments: Arguments, vocabulary: dict[str, Any]) -> VanillaTransformerConfig:
    """The preset with its overrides, or that of the model to go on from.

    Raises:
        UserError: what does not make a configuration, or does not fit the length of the sentences.
    """
    model_args, data, _, args = arguments
    overrides = parse_overrides(model_args.config_overrides)
    if "label_smoothing" in overrides:
        raise UserError("config_overrides: label_smoothing is set with --label_smoothing_factor")
    overrides["label_smoothing"] = args.label_smoothing_factor
    origin = model_args.model_name_or_path
    try:
        if origin:
            require_folder_or_hub_id(origin)
            config = AutoConfig.from_pretrained(origin)
            if not isinstance(config, VanillaTransformerConfig):
                raise UserError(f"{origin} is a model of type {config.model_type}, not of ours")
            config = VanillaTransformerConfig.from_pretrained(origin, **overrides)
        else:
            config = VanillaTransformerConfig.preset(model_args.preset, **{**vocabulary, **overrides})
    except (StrictDataclassError, ValueError, OSError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        where = f"model_name_or_path {origin}: " if isinstance(error, OSError) else ""
        raise UserError(where + on_one_line(reason)) from error
    for name in ("max_source_length", "max_target_length"):
        if getattr(data, name) > config.max_position_embeddings:
            raise UserError(
                f"{name}={getattr(data, name)} does not fit in max_position_embeddings="
                f"{config.max_position_embeddings}: give --{name} {config.max_position_embeddings}"
            )
    return config


def _require_directions(model_args: ModelArguments, data: DataArguments) -> None:
    """Raises UserError where a model that reads marked sources would go on with unmarked ones."""
    name = model_args.model_name_or_path
    if name and not data.directions and read_record(Path(name) / RUN_RECORD).get("recipe", {}).get("directions"):
        raise UserError(
            f"the sources of {name} begin with the language to translate into: give --directions "
            f"{data.source_lang}-{data.target_lang}"
        )


def _build_model(
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase
) -> VanillaTransformerForConditionalGeneration:
    model_args, _, _, args = arguments
    config = _configuration(arguments, _vocabulary_of(tokenizer))
    with _in_one_line():
        if model_args.model_name_or_path:
            model = load_own_model(model_args.model_name_or_path, config=config)
        else:
            model = VanillaTransformerForConditionalGeneration(config)
        if model_args.attn_implementation:
            model.set_attn_implementation(model_args.attn_implementation)
    require_fit(tokenizer, model.config)
    tokenizer.model_max_length = model.config.max_position_embeddings
    search = {
        "early_stopping": True,
        "length_penalty": args.length_penalty,
        "length_penalty_type": args.length_penalty_type,
    }
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
        max_length=min(args.generation_max_length, model.config.max_position_embeddings),
        num_beams=args.generation_num_beams,
        **(search if args.generation_num_beams > 1 else {}),
    )
    return model


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if isinstance(tokenizer, SeparateVocabularyTokenizer):
        return {
            "vocab_size": tokenizer.target_vocab_size,
            "encoder_vocab_size": len(tokenizer),
            "share_encoder_decoder_embeddings": False,
        }
    return {"vocab_size": len(tokenizer)}


def _settle_arguments(
    args: TrainingArguments, corpus: PreparedCorpus, config: VanillaTransformerConfig, scored: bool
) -> None:
    """Fill in what depends on the model and the data."""
    args.restore_callback_states_from_checkpoint = True  # the patience that is left is part of the run
    args.label_smoothing_factor = 0.0  # the model smooths; the Trainer's own smoother would hold all logits
    if args.learning_rate is None:
        if not args.warmup_steps > 1:
            raise UserError(f"warmup_steps={args.warmup_steps}: the paper's learning rate needs a number of steps")
        args.learning_rate = paper_learning_rate(config.d_model, args.warmup_steps)
    if args.rdrop_alpha and not (config.dropout or config.attention_dropout or config.activation_dropout):
        raise UserError("rdrop_alpha has no effect on a model without dropout: give --config_overrides dropout=0.1")
    if args.save_total_limit is None:
        args.save_total_limit = max(args.average_checkpoints, 2)
    if corpus.validation is None:
        args.eval_strategy = "no"
    if args.early_stopping_patience and args.eval_strategy == "no":
        raise UserError("early stopping needs evaluations: give --eval_strategy steps or epoch")
    if args.metric_for_best_model not in METRICS:
        raise UserError(f"metric_for_best_model={args.metric_for_best_model} is not one of {', '.join(METRICS)}")
    if args.metric_for_best_model != "loss" and not (scored and args.predict_with_generate):
        if args.early_stopping_patience or args.load_best_model_at_end:
            raise UserError(
                f"metric_for_best_model={args.metric_for_best_model} needs translations: give --predict_with_generate "
                "true or --metric_for_best_model loss"
            )
        args.metric_for_best_model, args.greater_is_better = "loss", False


def _require_positions(validation: Dataset | None, config: VanillaTransformerConfig) -> None:
    """Training drops what is too long; the validation set is taken as it is.

    Raises:
        UserError: a sentence of it is longer than the model can read.
    """
    if validation is None or config.position_embedding_type != "learned":
        return
    longest = max(map(max, token_lengths(validation)))
    if longest > config.max_position_embeddings:
        raise UserError(
            f"a sentence of the validation set has {longest} tokens, but the learned positions end at "
            f"max_position_embeddings={config.max_position_embeddings}: take it out, or give more positions"
        )


def _training_pairs(
    corpus: PreparedCorpus, subword_dropout: float, seed: int, config: VanillaTransformerConfig
) -> TrainingPairs:
    if not subword_dropout:
        return TrainingPairs(corpus.train.select_columns(["input_ids", "labels"]))
    if not backends(corpus.tokenizer):
        raise UserError(f"subword_dropout needs a tokenizer.json, which a {type(corpus.tokenizer).__name__} has not")
    sides = [SubwordDropout(backend, subword_dropout) for backend in backends(corpus.tokenizer)]
    longest = config.max_position_embeddings if config.position_embedding_type == "learned" else None
    return TrainingPairs(corpus.train, seed, *sides, longest=longest)


def _eval_max_length(corpus: PreparedCorpus, longest: int) -> int:
    """Room for a translation twice as long as the longest reference; an untrained model would fill any room."""
    if corpus.validation is None:
        return longest
    _, targets = token_lengths(corpus.validation)
    return min(longest, 2 * int(targets.max()) + 2)


def _text_metrics(
    corpus: PreparedCorpus, args: TrainingArguments, score: Scorer | None
) -> Callable[[EvalPrediction], dict[str, float]] | None:
    """Token ids -> text -> scores, and a few translations for the reader of the log."""
    if corpus.validation is None or not args.predict_with_generate:
        return None
    sources, references = corpus.validation["source"][:], corpus.validation["target"][:]
    if writes_lower_case(corpus.tokenizer):
        references = [reference.lower() for reference in references]
    tokenizer = corpus.tokenizer
    shown = range(0, len(sources), max(1, len(sources) // max(1, args.num_sample_translations)))

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        ids = np.where(prediction.predictions == IGNORED, tokenizer.pad_token_id, prediction.predictions)
        hypotheses = tokenizer.batch_decode(ids, skip_special_tokens=True)[: len(sources)]
        if args.process_index == 0:
            for row in shown[: args.num_sample_translations]:
                tqdm.write(
                    f"  source     {sources[row]}\n  reference  {references[row]}\n  model      {hypotheses[row]}\n"
                )
        return score(hypotheses, references) if score else {}

    return metrics


def _announce(trainer: VanillaTransformerTrainer, model: VanillaTransformerForConditionalGeneration, checkpoint):
    """One line on what is going to happen, and a warning where it cannot go well."""
    args = trainer.args
    steps_per_epoch = len(trainer.get_train_dataloader()) // args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else ceil(steps_per_epoch * args.num_train_epochs)
    warmup = args.get_warmup_steps(steps)
    if args.process_index == 0:
        print(
            f"training: {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}, "
            f"{steps:,} steps ({steps_per_epoch:,} an epoch, {warmup:,} of warm-up), {args.world_size} process(es)"
            + (f", going on from {checkpoint}" if checkpoint else ""),
            flush=True,
        )
        if warmup >= steps:
            print("  warning: the warm-up never ends: give fewer --warmup_steps or more --num_train_epochs", flush=True)


def _finish_weights(trainer: VanillaTransformerTrainer, output: Path) -> str:
    """Put the weights that the run is for into the model; return what they are, in words."""
    args = trainer.args
    best = trainer.state.best_model_checkpoint if args.load_best_model_at_end else None  # or none had a score
    chosen = f"best checkpoint by {args.metric_for_best_model}"
    if trainer.ema:
        if best:
            trainer.ema.load(Path(best))
        trainer.ema.copy_to_model()
        kept = f"exponential moving average, decay {args.ema_decay}"
        return f"{kept}, {chosen}" if best else kept
    if best:
        return chosen
    complete, steps = complete_checkpoints(output, args.world_size), trainer.state.global_step
    folders = [folder for folder in complete if steps_of(folder) <= steps][-args.average_checkpoints :]
    if args.average_checkpoints < 2 or len(folders) < 2:
        return "last step"
    trainer.accelerator.wait_for_everyone()
    trainer.model.load_state_dict(average_checkpoints(folders, trainer.model.all_tied_weights_keys), strict=False)
    trainer.model.tie_weights()
    return f"mean of the last {len(folders)} checkpoints"


def _recipe(arguments: Arguments) -> dict[str, Any]:
    """Every option that differs from its default, as a recipe would give it.

    Defaults are read off the classes: a second `TrainingArguments` would reset the distributed state of the first.
    """
    idle = {name for names in idle_options(*arguments[:3]).values() for name in names}
    recipe = {}
    for group in arguments:
        for name, option in type(group).__dataclass_fields__.items():
            value = getattr(group, name)
            default = option.default_factory() if callable(option.default_factory) else option.default
            derived = name in FILLED_IN or name in idle or value in ([], {}) or (value is False and default is None)
            if not option.init or value == default or derived:
                continue
            if isinstance(value, list):
                recipe[name] = _words(value)
            elif isinstance(value, str):
                [recipe[name]] = _words([value])
            elif isinstance(value, (int, float, dict)):
                recipe[name] = value
    return recipe


def _words(values: list) -> list[str]:
    return without_folders([str(getattr(value, "value", value)) for value in values])
