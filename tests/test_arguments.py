"""Options from flags, from a recipe, from both; and every message to the person who mistyped one."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.arguments import CLASSES, TrainingArguments, parse_arguments, parse_overrides, read_recipe
from hf_vanilla_transformer.errors import UserError

RECIPES = sorted((Path(__file__).resolve().parents[1] / "scripts" / "recipes").glob("*.yaml"))
NEEDED = ["--source_lang", "en", "--target_lang", "de", "--train_file", "train.en", "train.de"]


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and returns its path as the command line would have it."""

    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


class TestFlags:
    def test_each_group(self):
        model, data, tokenizer, training = parse_arguments(
            [*NEEDED, "--preset", "multi30k-tiny", "--vocab_size", "77", "--lowercase", "--max_tokens_per_batch", "99"]
        )
        assert model.preset == "multi30k-tiny"
        assert (data.source_lang, data.target_lang, data.train_file) == ("en", "de", ["train.en", "train.de"])
        assert (tokenizer.vocab_size, tokenizer.lowercase, tokenizer.separate_vocabularies) == (77, True, False)
        assert training.max_tokens_per_batch == 99

    def test_the_papers_optimiser_is_the_default(self):
        """Section 5.3: Adam with beta2 = 0.98 and epsilon = 1e-9, equation 3; section 5.4: label smoothing 0.1."""
        *_, training = parse_arguments(NEEDED)
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
        assert (training.lr_scheduler_type, training.warmup_steps) == ("inverse_sqrt", 4000)
        assert (training.learning_rate, training.max_grad_norm, training.weight_decay) == (None, 0.0, 0.0)
        assert training.label_smoothing_factor == 0.1

    @pytest.mark.parametrize("value", ["true", "True", "1"])
    def test_a_boolean_may_have_a_value(self, value):
        assert parse_arguments([*NEEDED, "--lowercase", value])[2].lowercase
        assert not parse_arguments([*NEEDED, "--lowercase", "false"])[2].lowercase

    def test_every_option_has_its_help(self):
        own = [option for group in CLASSES for option in fields(group) if option.name in group.__annotations__]
        assert {option.name for option in own if not option.metadata.get("help")} == set()


class TestRecipe:
    TEXT = (
        "source_lang: en\ntarget_lang: de\ntrain_file: [a.en, a.de]\n"
        "config_overrides: {dropout: 0.3, norm_position: pre}\n"
        "vocab_size: 500\nlearning_rate: 3.0e-3\nlowercase: true\nadam_epsilon: 1e-8\nseed: null\n"
    )

    def test_values(self, recipe):
        model, data, tokenizer, training = parse_arguments([recipe(self.TEXT)])
        assert (data.source_lang, data.train_file) == ("en", ["a.en", "a.de"])
        assert (tokenizer.vocab_size, tokenizer.lowercase) == (500, True)
        assert (training.learning_rate, training.adam_epsilon, training.seed) == (0.003, 1e-8, 42)
        assert parse_overrides(model.config_overrides) == {"dropout": 0.3, "norm_position": "pre"}

    def test_flags_win(self, recipe):
        path = recipe(self.TEXT)
        _, data, tokenizer, training = parse_arguments(
            [path, "--vocab_size", "9", "--train_file", "b.tsv", "--lowercase", "false", "--seed", "7"]
        )
        assert (tokenizer.vocab_size, tokenizer.lowercase, training.seed) == (9, False, 7)
        assert data.train_file == ["b.tsv"]
        assert data.source_lang == "en"

    def test_the_same_as_its_flags(self, recipe, tmp_path):
        flags = [*NEEDED, "--num_train_epochs", "3", "--ema_decay", "0.9", "--output_dir", str(tmp_path)]
        text = (
            "source_lang: en\ntarget_lang: de\ntrain_file: [train.en, train.de]\nnum_train_epochs: 3\nema_decay: 0.9\n"
            f"output_dir: {tmp_path}\n"
        )
        for ours, theirs in zip(parse_arguments([recipe(text)]), parse_arguments(flags), strict=True):
            if isinstance(ours, TrainingArguments):
                ours, theirs = ours.to_dict(), theirs.to_dict()
            assert ours == theirs

    @pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
    def test_those_in_the_repository(self, path):
        model, data, _, training = parse_arguments([str(path), "--dataset_name", "somewhere"])
        config = VanillaTransformerConfig.preset(model.preset, **parse_overrides(model.config_overrides))
        longest = max(data.max_source_length, data.max_target_length, training.generation_max_length)
        assert longest <= config.max_position_embeddings
        assert path.read_text(encoding="utf-8").startswith("#"), "a recipe begins by saying what it is"

    def test_there_are_some(self):
        assert RECIPES


class TestRecipeErrors:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("vocabsize: 3", r"recipe .*recipe\.yaml: unknown key 'vocabsize': did you mean 'vocab_size'\?"),
            ("colour: red", r"recipe .*: unknown key 'colour': see vanilla-transformer train --help"),
            ("1: 2", r"recipe .*: unknown key 1: see vanilla-transformer train --help"),
            ("- a", r"recipe .*recipe\.yaml: expected a mapping of option names to values"),
            ("", r"expected a mapping of option names to values"),
            ("[1", r"recipe .*recipe\.yaml: not YAML: while parsing a flow sequence"),
            ("source_lang: no", r"recipe .*: source_lang: put the value in quotes, or YAML takes it for true or fa"),
            ("eval_strategy: no", r"recipe .*: eval_strategy: put the value in quotes"),
        ],
    )
    def test_content(self, recipe, text, message):
        with pytest.raises(UserError, match=message) as caught:
            parse_arguments([recipe(text)])
        assert "\n" not in str(caught.value)

    def test_missing_file(self, tmp_path):
        path = tmp_path / "none.yaml"
        with pytest.raises(UserError, match=r"recipe .*none\.yaml: cannot be read \(No such file or directory\)"):
            parse_arguments([str(path)])

    def test_not_text(self, tmp_path):
        path = tmp_path / "binary.yml"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match=r"recipe .*binary\.yml: not YAML: 'utf-8' codec can't decode byte 0xff"):
            read_recipe(path)

    def test_quotes_help(self, recipe):
        path = recipe('source_lang: "no"\ntarget_lang: de\ntrain_file: [a, b]\neval_strategy: "no"\n')
        _, data, _, training = parse_arguments([path])
        assert (data.source_lang, training.eval_strategy) == ("no", "no")


class TestErrors:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (NEEDED[2:], "give both languages: --source_lang and --target_lang"),
            ([*NEEDED[:2], *NEEDED[4:]], "give both languages: --source_lang and --target_lang"),
            (NEEDED[:4], "the training text: give either --train_file or --dataset_name"),
            ([*NEEDED, "--per_device_train_batch_size", "32"], "has no effect: batches are made by --max_tokens"),
            ([*NEEDED, "--auto_find_batch_size", "true"], "has no effect: batches are made by --max_tokens"),
            ([*NEEDED, "--dataloader_drop_last", "true"], "has no effect: batches are made by --max_tokens"),
            ([*NEEDED, "--dataloader_persistent_workers", "true"], "has no effect on the training batches"),
            (
                [*NEEDED, "--max_steps", "-5", "--num_train_epochs", "0"],
                "num_train_epochs=0.0 is no training: give more",
            ),
            (
                [*NEEDED, "--source_lang", "English (US)"],
                r"source_lang='English \(US\)' is not a language code such as",
            ),
            ([*NEEDED[:2], "recipe.yaml", *NEEDED[2:]], "unknown word 'recipe.yaml': a recipe comes before all flags"),
            ([*NEEDED, "--eval_do_concat_batches", "false"], "eval_do_concat_batches is not for this trainer"),
            ([*NEEDED, "--batch_eval_metrics", "true"], "batch_eval_metrics is not for this trainer"),
            ([*NEEDED, "--prediction_loss_only", "true"], "is called --predict_with_generate false here"),
            ([*NEEDED, "--do_train", "false"], "do_train has no effect: `vanilla-transformer evaluate` scores"),
            ([*NEEDED, "--do_predict", "true"], "do_predict has no effect: the test sets that are given"),
            ([*NEEDED, "--push_to_hub", "true"], "push_to_hub is not for training: `vanilla-transformer publish`"),
            ([*NEEDED, "--hub_token", "hf_x"], "hub_token is not for training: `vanilla-transformer publish` uploads"),
            ([*NEEDED, "--dataset_name", "x"], "the training text: give either --train_file or --dataset_name"),
            (
                [*NEEDED, "--generation_num_beams", "1", "--length_penalty", "0.6"],
                "length_penalty has no effect with one beam: give --generation_num_beams",
            ),
            ([*NEEDED, "--max_tokens_per_batch", "0"], r"max_tokens_per_batch=0 is below 1"),
            ([*NEEDED, "--average_checkpoints", "-1"], r"average_checkpoints=-1 is below 0"),
            (
                [*NEEDED, "--save_only_model", "true"],
                "average_checkpoints needs complete checkpoints: give --average_checkpoints 0 as well",
            ),
            ([*NEEDED, "--load_best_model_at_end", "true"], "load_best_model_at_end needs a validation set"),
            (
                [*NEEDED, "--consistency_start", "9"],
                "consistency_start has no effect without --rdrop",
            ),
            ([*NEEDED, "--consistency_start", "-1"], "consistency_start=-1 is below 0"),
            ([*NEEDED, "--ema_decay", "1"], r"ema_decay=1\.0 is not in \[0, 1\)"),
            ([*NEEDED, "--ema_decay", "-0.1"], r"ema_decay=-0\.1 is not in \[0, 1\)"),
            ([*NEEDED, "--subword_dropout", "1"], r"subword_dropout=1\.0 is not in \[0, 1\)"),
            (
                [*NEEDED, "--subword_dropout", "0.1", "--tokenizer_type", "unigram"],
                "subword_dropout needs a bpe or byte-level tokenizer, not unigram",
            ),
            (
                [*NEEDED, "--tokenizer_type", "wordpiece"],
                "tokenizer_type='wordpiece' is not one of bpe, unigram, byte-level, word-level",
            ),
            ([*NEEDED, "--preset", "paper"], "preset='paper' is not one of paper-base, paper-big, multi30k-tiny"),
            ([*NEEDED, "--normalization", "nfd"], "normalization='nfd' is not one of nfc, nfkc, none"),
            ([*NEEDED, "--length_penalty_type", "Wu"], "length_penalty_type='Wu' is not one of average, wu"),
            ([*NEEDED, "--config_overrides", "dropout"], "config_overrides: 'dropout' is not of the form name=value"),
            (
                [*NEEDED, "--config_overrides", "num_layers=3"],
                r"config_overrides: unknown field 'num_layers': did you mean '\w*layers'\?",
            ),
            ([*NEEDED, "--config_overrides", "x=3"], "config_overrides: unknown field 'x': see the fields of Vanil"),
            (
                [*NEEDED, "--config_overrides", "{dropout: 1}"],
                r"config_overrides: '\{dropout: 1\}' cannot be read: Exp",
            ),
            (
                [*NEEDED, "--config_overrides", "d_model=["],
                r"config_overrides: 'd_model=\[' cannot be read: while pars",
            ),
            ([*NEEDED, "--colour", "red"], "unknown word '--colour': see vanilla-transformer train --help"),
            ([*NEEDED, "--vocab", "9"], "unknown word '--vocab': "),  # no abbreviations
            ([*NEEDED, "--eval_strategy", "sometimes"], "sometimes is not a valid IntervalStrategy"),
        ],
        ids=lambda value: " ".join(value[7:]) if isinstance(value, list) else "",
    )
    def test_message(self, flags, message):
        with pytest.raises(UserError, match=message) as caught:
            parse_arguments(flags)
        assert "\n" not in str(caught.value)

    def test_wrong_type(self, capsys):
        with pytest.raises(SystemExit):
            parse_arguments([*NEEDED, "--vocab_size", "many"])
        assert "--vocab_size/--vocab-size: invalid int value: 'many'" in capsys.readouterr().err

    def test_dropout_with_the_tokenizers_that_have_merges(self):
        for tokenizer_type in ("bpe", "byte-level"):
            flags = [*NEEDED, "--subword_dropout", "0.1", "--tokenizer_type", tokenizer_type]
            assert parse_arguments(flags)[2].subword_dropout == 0.1


class TestOverrides:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, {}),
            ("", {}),
            ("dropout=0.1", {"dropout": 0.1}),
            ("dropout=0.1, norm_position=pre,encoder_layers=12", {"dropout": 0.1, "norm_position": "pre",
                                                                  "encoder_layers": 12}),
            ("head_dim=null,scale_embedding=false", {"head_dim": None, "scale_embedding": False}),
            ('{"dropout": 0.2, "use_cache": true}', {"dropout": 0.2, "use_cache": True}),
            ("hidden_size=64", {"hidden_size": 64}),
        ],
    )  # fmt: skip
    def test_forms(self, text, expected):
        assert parse_overrides(text) == expected

    def test_a_recipes_mapping_survives_as_it_is(self, recipe):
        overrides = {"dropout": 0.25, "activation_function": "gelu", "head_dim": None, "attention_bias": False}
        text = yaml.safe_dump({"source_lang": "en", "target_lang": "de", "train_file": ["a", "b"],
                               "config_overrides": overrides})  # fmt: skip
        assert parse_overrides(parse_arguments([recipe(text)])[0].config_overrides) == overrides


def test_overrides_are_numbers_as_people_write_them():
    for text in ("layer_norm_eps=1e-6,dropout=.1", '{"layer_norm_eps": "1e-6", "dropout": 0.1}'):
        overrides = parse_overrides(text)
        assert overrides == {"layer_norm_eps": 1e-6, "dropout": 0.1}
        assert VanillaTransformerConfig.preset("test", vocab_size=9, **overrides).layer_norm_eps == 1e-6


@pytest.mark.parametrize("name", ["max_train_samples", "vocab_size", "eval_num_beams", "generation_num_beams"])
def test_numbers_below_one(name):
    with pytest.raises(UserError, match=f"{name}=0 is below 1"):
        parse_arguments([*NEEDED, f"--{name}", "0"])
