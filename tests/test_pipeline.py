"""The translation pipeline: what its users of transformers 4 expect, against `translate` and plain `generate()`."""

import json
import warnings

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, MarianConfig, MarianMTModel, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.pipeline_vanilla_transformer import VanillaTransformerTranslationPipeline
from hf_vanilla_transformer.publishing import export_folder, publish
from hf_vanilla_transformer.tokenization_vanilla_transformer import (
    SeparateVocabularyTokenizer,
    joint_tokenizer,
    learn_backend,
    load_tokenizer,
)
from hf_vanilla_transformer.translation import translate, translate_nbest
from hub_server import loopback_hub
from test_publishing import WITHOUT_PACKAGE, run_python, usages

SOURCE = ["the old man sleeps .", "a dog sees the small cat .", "the cat runs .", "who sees a dog ?", "the man runs ."]
TARGET = ["der alte mann schläft .", "ein hund sieht die katze .", "die katze rennt .", "wer sieht ?", "er rennt ."]
TOKEN_IDS = {"pad_token_id": 1, "eos_token_id": 3, "decoder_start_token_id": 2}
LIMIT = 64  # max_position_embeddings of the size `test`
ELSEWHERE = """
import json
from transformers import pipeline

found = {}
for name in models:
    translator = pipeline("translation", model=name, trust_remote_code=True, device="cpu")
    translator.save_pretrained("again")
    tasks = {"explicit": translator} | {
        "without a task": pipeline(model=name, trust_remote_code=True),
        "saved again": pipeline("translation", model="again", trust_remote_code=True),
    }
    for task, translator in tasks.items():
        found[f"{name} {task}"] = [type(translator).__module__, translator(sentences, batch_size=2)]
print(json.dumps(found))
"""


def make_tokenizer(folder, separate):
    if not separate:
        return joint_tokenizer(learn_backend((SOURCE + TARGET) * 4, vocab_size=90))
    files = [folder / "source.json", folder / "target.json"]
    for file, texts in zip(files, (SOURCE, TARGET), strict=True):
        learn_backend(texts * 4, vocab_size=60).save(str(file))
    return SeparateVocabularyTokenizer(*map(str, files))


def make_model(tokenizer):
    sizes = {"vocab_size": getattr(tokenizer, "target_vocab_size", len(tokenizer))}
    if isinstance(tokenizer, SeparateVocabularyTokenizer):
        sizes |= {"encoder_vocab_size": len(tokenizer), "share_encoder_decoder_embeddings": False}
    torch.manual_seed(4)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.preset("test", **sizes)).eval()
    model.generation_config.update(max_length=16, num_beams=2, length_penalty=0.6)
    with torch.no_grad():  # a random model says the same to everything, unless it listens to the source loudly
        for layer in model.model.decoder.stack.layers:
            layer.encoder_attn.out_proj.weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory, run_record):
    """What two trainings left behind, with a joint vocabulary and with two."""
    folders = {}
    for kind in ("joint", "separate"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        tokenizer = make_tokenizer(tmp_path_factory.mktemp("vocabularies"), kind == "separate")
        make_model(tokenizer).save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
        (folders[kind] / "run.json").write_text(json.dumps(run_record))
    return folders


@pytest.fixture(scope="module", params=["joint", "separate"])
def run_folder(request, run_folders):
    return run_folders[request.param]


@pytest.fixture(scope="module")
def translator(run_folder):
    return pipeline("vanilla-translation", model=str(run_folder), device="cpu")


@pytest.fixture
def joint(run_folders):
    """A pipeline that a test may change."""
    return pipeline("vanilla-translation", model=str(run_folders["joint"]), device="cpu")


def expected(translator, sentences, **options):
    return [
        {"translation_text": text} for text in translate(translator.model, translator.tokenizer, sentences, **options)
    ]


class TestInputs:
    def test_a_text_gives_a_list_of_one(self, translator):
        assert translator(SOURCE[1]) == expected(translator, [SOURCE[1]])

    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_a_list_keeps_its_order(self, translator, batch_size):
        sentences = [SOURCE[1], SOURCE[0], SOURCE[3], SOURCE[2], SOURCE[1]]
        wanted = expected(translator, sentences)
        assert len({result["translation_text"] for result in wanted}) > 2, "or the order is not tested"
        assert translator(sentences, batch_size=batch_size) == wanted

    def test_other_sequences_are_lists(self, joint):
        wanted = expected(joint, SOURCE)
        assert joint(tuple(SOURCE)) == wanted
        assert joint(Dataset.from_dict({"en": SOURCE})["en"], batch_size=2) == wanted
        assert joint([]) == joint(()) == []

    @pytest.mark.parametrize("batch_size", [1, 2])
    @pytest.mark.parametrize(
        "stream",
        [
            lambda texts: (text for text in texts),
            iter,
            lambda texts: KeyDataset(Dataset.from_dict({"en": texts}), "en"),
            lambda texts: (row["en"] for row in Dataset.from_dict({"en": texts}).to_iterable_dataset()),
        ],
        ids=["generator", "iterator", "KeyDataset", "streamed dataset"],
    )
    def test_streams_give_a_list_of_one_for_each_text(self, joint, stream, batch_size):
        results = joint(stream(SOURCE), batch_size=batch_size)
        assert not isinstance(results, list)
        assert list(results) == [[result] for result in expected(joint, SOURCE)]

    def test_a_stream_is_translated_while_it_is_read(self, joint):
        taken = []
        texts = (taken.append(text) or text for text in SOURCE)
        assert next(iter(joint(texts, batch_size=2))) == expected(joint, SOURCE[:1])
        assert taken == SOURCE[:2]

    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_an_empty_text_stays_empty_in_its_place(self, translator, batch_size):
        sentences = ["", SOURCE[0], " \t ", SOURCE[1]]
        wanted = expected(translator, sentences)
        assert [bool(result["translation_text"]) for result in wanted] == [False, True, False, True]
        assert translator(sentences, batch_size=batch_size) == wanted
        assert translator("") == [{"translation_text": ""}]
        assert translator("", num_return_sequences=2) == [{"translation_text": ""}] * 2


class TestSearch:
    def test_the_settings_are_those_of_the_model(self, joint):
        usual = joint(SOURCE)
        joint.model.generation_config.update(num_beams=4, max_length=7)
        changed = joint(SOURCE)
        assert changed == expected(joint, SOURCE)
        assert changed != usual

    def test_arguments_of_generate_win(self, translator):
        assert translator(SOURCE, num_beams=4) == expected(translator, SOURCE, num_beams=4)
        batch = translator.tokenizer(SOURCE[0], return_tensors="pt")
        for options in ({"max_length": 6}, {"max_new_tokens": 3}, {"num_beams": 1, "repetition_penalty": 3.0}):
            written = translator.model.generate(**batch, **options)[0]
            text = translator.tokenizer.decode(written, skip_special_tokens=True)
            assert translator(SOURCE[0], **options) == [{"translation_text": text}]

    def test_arguments_of_a_call_win_over_those_of_the_pipeline(self, run_folders):
        options = {"num_beams": 3, "batch_size": 2, "return_tensors": True, "device": "cpu"}
        fixed = pipeline("vanilla-translation", model=str(run_folders["joint"]), **options)
        plain = pipeline("vanilla-translation", model=str(run_folders["joint"]), device="cpu")
        texts = [{"translation_text": result["translation_text"]} for result in fixed(SOURCE)]
        assert texts == expected(plain, SOURCE, num_beams=3)
        assert fixed(SOURCE, num_beams=1, return_tensors=False) == expected(plain, SOURCE, num_beams=1)

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_several_translations_of_each_text(self, translator, batch_size):
        nbest = translate_nbest(translator.model, translator.tokenizer, SOURCE, nbest=3, num_beams=4)
        wanted = [[{"translation_text": hypothesis.text} for hypothesis in hypotheses] for hypotheses in nbest]
        options = {"num_beams": 4, "num_return_sequences": 3, "batch_size": batch_size}
        assert translator(SOURCE, **options) == wanted
        assert translator(SOURCE[0], **options) == wanted[0]

    def test_a_whole_generation_config(self, joint):
        config = GenerationConfig.from_dict({**joint.model.generation_config.to_dict(), "num_beams": 3})
        assert joint(SOURCE, generation_config=config) == expected(joint, SOURCE, num_beams=3)

    def test_without_a_maximum_the_papers_holds(self, joint):
        joint.model.generation_config.max_length = None
        long = " ".join(SOURCE[:3])
        for text in (SOURCE[2], long):
            assert joint(text) == expected(joint, [text])
            length = joint(text, return_tensors=True)[0]["translation_token_ids"].shape[0]
            assert length == min(joint.tokenizer(text, return_length=True)["length"][0] + 50, LIMIT)

    @pytest.mark.parametrize(
        "option",
        [{"max_length": 9}, {"max_new_tokens": 8}, {"generation_config": GenerationConfig(max_length=9, **TOKEN_IDS)}],
        ids=lambda option: next(iter(option)),
    )
    def test_without_a_maximum_that_of_the_caller_holds(self, joint, option):
        joint.model.generation_config.max_length = None
        [result] = joint(SOURCE[2], return_tensors=True, **option)
        assert result["translation_token_ids"].shape == (9,)


class TestResults:
    def test_token_ids_are_those_of_generate(self, translator):
        written = translator.model.generate(**translator.tokenizer(SOURCE[1], return_tensors="pt"))[0]
        [result] = translator(SOURCE[1], return_tensors=True)
        assert result["translation_token_ids"].equal(written)
        assert [{"translation_text": result["translation_text"]}] == translator(SOURCE[1])
        [result] = translator(SOURCE[1], return_tensors=True, return_text=False)
        assert result.keys() == {"translation_token_ids"}

    def test_what_generate_wraps_is_unwrapped(self, joint):
        assert joint(SOURCE, return_dict_in_generate=True, batch_size=2) == joint(SOURCE)


class TestMistakes:
    def test_a_text_that_is_too_long(self, translator):
        with pytest.raises(UserError, match=r"\d+ tokens, but the model reads at most 64 .*: split .*: 'dog dog .*'"):
            translator([SOURCE[0], "dog " * 100])

    def test_truncation_cuts_a_text_off(self, translator):
        long = " ".join(SOURCE * 5)
        ids = translator.tokenizer(long)["input_ids"]
        assert len(ids) > LIMIT
        cut = torch.tensor([[*ids[: LIMIT - 1], translator.tokenizer.eos_token_id]])
        written = translator.model.generate(input_ids=cut, attention_mask=torch.ones_like(cut))[0]
        text = translator.tokenizer.decode(written, skip_special_tokens=True)
        assert translator(long, truncation=True) == [{"translation_text": text}]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert translator(SOURCE[0], truncation=True) == translator(SOURCE[0])

    @pytest.mark.parametrize(
        ("inputs", "kind"), [(None, "NoneType"), ([SOURCE], "list"), ({"text": "a"}, "dict"), ([SOURCE[0], 3], "int")]
    )
    def test_something_that_is_not_text(self, joint, inputs, kind):
        with pytest.raises(UserError, match=f"cannot translate a {kind}: give a text, .* the column of a dataset"):
            joint(inputs)

    @pytest.mark.parametrize("languages", [{"src_lang": "en"}, {"tgt_lang": "de"}])
    def test_languages(self, joint, run_folders, languages):
        [(name, code)] = languages.items()
        message = f"{name}='{code}'.*: the model translates in one direction: leave them out"
        with pytest.raises(UserError, match=message):
            joint(SOURCE, **languages)
        with pytest.raises(UserError, match=message):
            pipeline("vanilla-translation", model=str(run_folders["joint"]), device="cpu", **languages)

    def test_nothing_to_return(self, joint):
        with pytest.raises(UserError, match="return_text=False leaves nothing to return: add return_tensors=True"):
            joint(SOURCE[0], return_text=False)

    def test_an_argument_that_nobody_knows(self, joint):
        with pytest.raises(ValueError, match="num_beam"):
            joint(SOURCE[0], num_beam=3)


def test_any_sequence_to_sequence_model(tmp_path, run_folders):
    tokenizer = make_tokenizer(tmp_path, separate=False)
    torch.manual_seed(0)
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": LIMIT, "init_std": 1.0}
    config = MarianConfig(vocab_size=len(tokenizer), forced_eos_token_id=None, **shape, **TOKEN_IDS)
    model = MarianMTModel(config).eval()
    model.generation_config.max_length = 12
    translator = VanillaTransformerTranslationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    assert len({result["translation_text"] for result in translator(SOURCE)}) > 1
    assert translator(SOURCE, batch_size=2) == expected(translator, SOURCE)


class TestWhereItIsFound:
    def test_importing_the_package_leaves_the_tasks_of_transformers_alone(self, run_folders):
        assert "translation" not in PIPELINE_REGISTRY.get_supported_tasks()
        with pytest.raises(KeyError, match=r"[Tt]ask translation"):  # removed; in older versions unknown
            pipeline("translation", model=str(run_folders["joint"]))

    def test_saved_with_the_package_it_is_data_alone_and_loads_with_the_package(self, translator, tmp_path):
        translator.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.py"))
        again = pipeline("vanilla-translation", model=str(tmp_path), device="cpu")
        assert again(SOURCE) == expected(translator, SOURCE)

    @pytest.mark.usefixtures("remote_code")
    def test_a_published_folder_with_the_package(self, run_folder, translator, tmp_path):
        """Both ways; the code of the folder runs only where it is asked for."""
        folder = str(export_folder(run_folder, tmp_path / "hub", repo_id="user/tiny"))
        entry = json.loads((tmp_path / "hub" / "config.json").read_text())["custom_pipelines"]
        name = "pipeline_vanilla_transformer.VanillaTransformerTranslationPipeline"
        assert entry == {"translation": {"impl": name, "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}}
        ours = pipeline("vanilla-translation", model=folder, device="cpu")
        theirs = pipeline("translation", model=folder, device="cpu", trust_remote_code=True)
        assert type(ours) is VanillaTransformerTranslationPipeline
        assert type(theirs).__module__.startswith("transformers_modules.")
        assert ours(SOURCE) == theirs(SOURCE) == expected(translator, SOURCE)
        with pytest.raises(ValueError, match=r"the code in the pipeline file .* `trust_remote_code=True`"):
            pipeline("translation", model=folder)

    def test_without_the_package(self, run_folders, tmp_path):
        """A folder and a name on the Hub, with and without a task, saved again, and as the card says."""
        local = str(export_folder(run_folders["separate"], tmp_path / "local", repo_id="user/tiny"))
        with loopback_hub() as hub:
            publish(run_folders["joint"], "user/tiny", token=hub.token, endpoint=hub.endpoint)
            example = usages(hub, "user/tiny")[0]
            code = f"models, sentences = {['user/tiny', local]!r}, {SOURCE!r}\n{ELSEWHERE}\n{example}"
            results, printed = run_python(f"{WITHOUT_PACKAGE}\n{code}", tmp_path, hub).splitlines()
        found = json.loads(results)
        assert len(found) == 6
        for key, (module, translations) in found.items():
            folder = run_folders["joint" if key.startswith("user/tiny") else "separate"]
            model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
            texts = translate(model, load_tokenizer(folder), SOURCE)
            assert translations == [{"translation_text": text} for text in texts], key
            assert module.startswith("transformers_modules."), key
        assert printed.startswith("[{'translation_text': ")


@pytest.mark.gpu
def test_the_gpu_is_taken_unless_another_device_is_named(run_folder, translator):
    for device in (None, 0, "cuda"):
        on_gpu = pipeline("vanilla-translation", model=str(run_folder), device=device)
        assert on_gpu.device.type == on_gpu.model.device.type == "cuda"
        assert on_gpu(["", *SOURCE], batch_size=3) == expected(translator, ["", *SOURCE])
    assert translator.model.device.type == "cpu"
