import hashlib
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from hf_vanilla_transformer.embedded_corpus import (
    CASES,
    LEXICON,
    REORDERED_EXAMPLE,
    EmbeddedCorpus,
    Grammar,
    count_pairs,
    draw_splits,
    german_noun_phrase,
    make_corpus,
    write_corpus,
)

# Written by hand, without the grammar.
GOLD = [
    # verb second, definite and indefinite objects, adjective endings
    ("The old man reads the book today.", "Der alte Mann liest das Buch heute."),
    ("The old man reads a new book today.", "Der alte Mann liest heute ein neues Buch."),
    ("Today the old man reads the book.", "Heute liest der alte Mann das Buch."),
    ("I drink cold milk in the evening.", "Ich trinke am Abend kalte Milch."),
    ("A clever girl draws an expensive umbrella.", "Ein kluges Mädchen zeichnet einen teuren Regenschirm."),
    (
        "Beside the church my brother waits for the boy.",
        "Neben der Kirche wartet mein Bruder auf den Jungen.",
    ),
    ("The rooms are dark.", "Die Zimmer sind dunkel."),
    ("He runs into the house.", "Er läuft ins Haus."),
    ("In our castle she sings.", "In unserem Schloss singt sie."),
    # agreement
    ("You read a letter.", "Du liest einen Brief."),
    ("You carry the bag.", "Du trägst die Tasche."),
    ("You work in the garden.", "Du arbeitest im Garten."),
    ("We invite old friends.", "Wir laden alte Freunde ein."),
    ("She invites him on Sunday.", "Sie lädt ihn am Sonntag ein."),
    # datives
    ("The child helps her.", "Das Kind hilft ihr."),
    ("My uncles thank these young women.", "Meine Onkel danken diesen jungen Frauen."),
    ("The queen gives a ring to the guest.", "Die Königin gibt dem Gast einen Ring."),
    ("They show our cars to the children.", "Sie zeigen den Kindern unsere Autos."),
    ("The dogs play with the small cats in the park.", "Die Hunde spielen im Park mit den kleinen Katzen."),
    # perfect with haben and sein
    (
        "The student wrote a short poem last week.",
        "Der Student hat letzte Woche ein kurzes Gedicht geschrieben.",
    ),
    ("Last Sunday they went into the forest.", "Letzten Sonntag sind sie in den Wald gegangen."),
    ("You got up yesterday.", "Du bist gestern aufgestanden."),
    ("They read the newspapers.", "Sie lesen die Zeitungen."),
    ("They read the newspapers yesterday.", "Sie haben die Zeitungen gestern gelesen."),
    ("The soup was good.", "Die Suppe war gut."),
    # separable verbs
    ("My daughter opens the window.", "Meine Tochter macht das Fenster auf."),
    ("He picks them up tonight.", "Er holt sie heute Abend ab."),
    ("She takes the red coat off.", "Sie zieht den roten Mantel aus."),
    ("I hope to close the gate.", "Ich hoffe, das Tor zuzumachen."),
    ("The king hopes to sleep soon.", "Der König hofft, bald zu schlafen."),
    # modals
    ("The aunt wants to buy fresh apples tomorrow.", "Die Tante will morgen frische Äpfel kaufen."),
    ("You must answer the doctor tonight.", "Du musst dem Arzt heute Abend antworten."),
    # negation
    ("The teacher does not see the mouse.", "Der Lehrer sieht die Maus nicht."),
    ("The teacher does not see a mouse.", "Der Lehrer sieht keine Maus."),
    ("They did not eat carrots yesterday.", "Sie haben gestern keine Karotten gegessen."),
    ("She does not drink hot tea.", "Sie trinkt keinen heißen Tee."),
    ("He cannot repair the radio today.", "Er kann das Radio heute nicht reparieren."),
    ("We do not dance in the kitchen.", "Wir tanzen nicht in der Küche."),
    ("The doors are not heavy.", "Die Türen sind nicht schwer."),
    # questions
    ("Do you see the birds?", "Siehst du die Vögel?"),
    ("Is the clock cheap?", "Ist die Uhr billig?"),
    ("Did the guests come out of the hotel yesterday?", "Sind die Gäste gestern aus dem Hotel gekommen?"),
    ("Who washes this shirt?", "Wer wäscht dieses Hemd?"),
    ("What does my sister buy in the city?", "Was kauft meine Schwester in der Stadt?"),
    ("Who does the father call?", "Wen ruft der Vater an?"),
    ("Who did she follow yesterday?", "Wem ist sie gestern gefolgt?"),
    ("Who does the actress talk to?", "Mit wem spricht die Schauspielerin?"),
    ("Where does the waitress work?", "Wo arbeitet die Kellnerin?"),
    ("When must he return from the village?", "Wann muss er aus dem Dorf zurückkommen?"),
    ("Why does the painter not understand him?", "Warum versteht der Maler ihn nicht?"),
    # subclauses
    ("I know that she lends a bicycle to him.", "Ich weiß, dass sie ihm ein Fahrrad leiht."),
    (
        "She is happy because the old man reads the book today.",
        "Sie ist glücklich, weil der alte Mann das Buch heute liest.",
    ),
    ("If the princess opens the box, he is sad.", "Wenn die Prinzessin die Kiste aufmacht, ist er traurig."),
    (
        "We ask whether the sons called her yesterday.",
        "Wir fragen, ob die Söhne sie gestern angerufen haben.",
    ),
    (REORDERED_EXAMPLE, "Sie ist glücklich, weil der alte Mann dem Kind das Buch heute geben will."),
]


def words_of(sentence):
    return [word.strip(".,?") for word in sentence.split()]


def lexicon_of(english):
    """The smallest lexicon that has all words of the sentence, so that its grammar can be walked through."""
    text, words = f" {english.lower().rstrip('.?')} ", set(words_of(english.lower()))
    subject = {"him": "he", "her": "she", "them": "they", "i": "I"}
    pronouns = {subject.get(word, word) for word in words}

    def inflected(verb):
        return {verb, verb + "s", verb + "es", verb[:-1] + "ies"}

    return replace(
        LEXICON,
        nouns=tuple(n for n in LEXICON.nouns if {n.english, n.english_plural} & words),
        adjectives=tuple(a for a in LEXICON.adjectives if a.english in words),
        determiners=tuple(d for d in LEXICON.determiners if d.indefinite or {d.singular, d.plural} & words),
        verbs=tuple(v for v in LEXICON.verbs if (inflected(v.english) | {v.past}) & words),
        times=tuple(t for t in LEXICON.times if f" {t.english.lower()} " in text),
        prepositions=tuple(p for p in LEXICON.prepositions if p[0] in words),
        pronouns=tuple(p for p in LEXICON.pronouns if p in pronouns),
        thoughts=tuple(t for t in LEXICON.thoughts if inflected(t) & words),
    )


@pytest.fixture(scope="module")
def grammar():
    return Grammar(LEXICON)


@pytest.fixture(scope="module")
def splits():
    return draw_splits(train=20000, validation=500, test=1000, seed=1)


@pytest.mark.parametrize(("english", "german"), GOLD, ids=[english for english, _ in GOLD])
def test_gold_sentences_are_translated(english, german):
    found = {s.german for s in Grammar(lexicon_of(english)).sentences() if s.english == english}
    assert found == {german}


@pytest.mark.parametrize(
    "english",
    [
        "The man sees the man.",
        "My woman sings in the garden.",
        "You must not sleep today.",
        "The king hopes to sleep.",
        "I sleep.",
        "She wants to need the car.",
        "She does not sing every day.",
    ],
)
def test_ambiguous_and_odd_sentences_are_not_made(english):
    assert english not in {s.english for s in Grammar(lexicon_of(english)).sentences()}


@pytest.mark.parametrize(
    ("stem", "adjective", "noun", "number", "forms"),
    [
        ("d", "old", "man", "singular", "der alte Mann, den alten Mann, dem alten Mann"),
        ("d", "old", "man", "plural", "die alten Männer, die alten Männer, den alten Männern"),
        ("ein", "old", "man", "singular", "ein alter Mann, einen alten Mann, einem alten Mann"),
        ("", "old", "man", "plural", "alte Männer, alte Männer, alten Männern"),
        ("dies", "young", "woman", "singular", "diese junge Frau, diese junge Frau, dieser jungen Frau"),
        ("mein", "young", "cat", "singular", "meine junge Katze, meine junge Katze, meiner jungen Katze"),
        ("kein", "new", "book", "singular", "kein neues Buch, kein neues Buch, keinem neuen Buch"),
        ("kein", "new", "book", "plural", "keine neuen Bücher, keine neuen Bücher, keinen neuen Büchern"),
        ("d", "tired", "boy", "singular", "der müde Junge, den müden Jungen, dem müden Jungen"),
        (
            "unser",
            "dark",
            "house",
            "singular",
            "unser dunkles Haus, unser dunkles Haus, unserem dunklen Haus",
        ),
        ("", "cold", "coffee", "singular", "kalter Kaffee, kalten Kaffee, kaltem Kaffee"),
        ("", "hot", "milk", "singular", "heiße Milch, heiße Milch, heißer Milch"),
        ("d", "expensive", "car", "plural", "die teuren Autos, die teuren Autos, den teuren Autos"),
    ],
)
def test_noun_phrases_are_declined(stem, adjective, noun, number, forms):
    chosen_adjective = next(a for a in LEXICON.adjectives if a.english == adjective)
    chosen_noun = next(n for n in LEXICON.nouns if n.english == noun)
    declined = [german_noun_phrase(stem, chosen_adjective, chosen_noun, number, case) for case in CASES]
    assert ", ".join(declined) == forms


@pytest.mark.parametrize(
    "forms",
    [
        "lese liest liest lesen",
        "esse isst isst essen",
        "sehe siehst sieht sehen",
        "wasche wäschst wäscht waschen",
        "lade lädst lädt laden",
        "helfe hilfst hilft helfen",
        "antworte antwortest antwortet antworten",
        "zeichne zeichnest zeichnet zeichnen",
        "finde findest findet finden",
        "tanze tanzt tanzt tanzen",
        "begrüße begrüßt begrüßt begrüßen",
        "vermisse vermisst vermisst vermissen",
        "laufe läufst läuft laufen",
        "werfe wirfst wirft werfen",
        "repariere reparierst repariert reparieren",
    ],
)
def test_verbs_are_conjugated(forms):
    verb = next(v for v in LEXICON.verbs if v.infinitive == forms.split()[-1])
    assert [verb.present(person) for person in range(4)] == forms.split()


def test_the_lexicon_has_one_german_word_for_each_english_word():
    for entries in (LEXICON.nouns, LEXICON.adjectives, LEXICON.verbs):
        assert len({entry.english for entry in entries}) == len(entries)
    assert len({noun.german for noun in LEXICON.nouns}) == len(LEXICON.nouns)


def small_lexicon():
    nouns = {"man", "boy", "book", "tea", "door", "house", "dog"}
    verbs = {"read", "drink", "see", "help", "give", "open", "go", "play", "sleep", "miss"}
    return replace(
        LEXICON,
        nouns=tuple(n for n in LEXICON.nouns if n.english in nouns),
        adjectives=tuple(a for a in LEXICON.adjectives if a.english in ("old", "cold", "happy")),
        determiners=tuple(d for d in LEXICON.determiners if d.singular in ("the", "a")),
        verbs=tuple(v for v in LEXICON.verbs if v.english in verbs),
        times=tuple(t for t in LEXICON.times if t.english in ("today", "every day", "yesterday")),
        prepositions=LEXICON.prepositions[:1],
        pronouns=("I", "she"),
        thoughts=("know", "ask"),
    )


def test_count_is_the_number_of_distinct_sentences():
    lexicon = small_lexicon()
    german, sentences = {}, 0
    for sentence in Grammar(lexicon).sentences():
        sentences += 1
        assert german.setdefault(sentence.english, sentence.german) == sentence.german
    assert sentences > 100_000
    assert count_pairs(lexicon) == sentences == len(german)


def test_there_are_over_a_million_pairs(grammar):
    assert count_pairs() == grammar.count() > 1_000_000_000_000


def test_an_english_sentence_has_one_translation(grammar):
    rng, german = random.Random(5), {}
    for _ in range(100_000):
        sentence = grammar.draw(rng)
        assert 3 <= len(sentence.english.split()) <= 16
        assert german.setdefault(sentence.english, sentence.german) == sentence.german


def test_sentences_are_plain_and_of_moderate_length(splits):
    for sentence in (s for split in splits.values() for s in split):
        assert 3 <= len(sentence.english.split()) <= 16
        assert 3 <= len(sentence.german.split()) <= 16
        for text in (sentence.english, sentence.german):
            assert text[0].isupper() and text[-1] in ".?" and "  " not in text and text == text.strip()
        assert sentence.english[-1] == sentence.german[-1]


def test_splits_have_their_sizes_and_share_no_sentence(splits):
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 20000,
        "validation": 500,
        "test": 1000,
    }
    english = [sentence.english for split in splits.values() for sentence in split]
    assert len(set(english)) == len(english)


def test_every_test_sentence_has_a_combination_that_training_lacks(grammar, splits):
    trained = set().union(*(sentence.combinations for sentence in splits["train"]))
    assert all(sentence.combinations - trained for sentence in splits["test"])
    assert not trained & grammar.held_out()
    assert all(not sentence.combinations & grammar.held_out() for sentence in splits["validation"])


@pytest.mark.parametrize(
    ("english", "combinations"),
    [
        (
            "The queen gives a ring to the guest.",
            "give: statement, present; queen: nominative singular; ring: accusative singular; guest: dative singular",
        ),
        (
            "Did the men help the boy in the park yesterday?",
            "help: yes-no question, perfect; man: nominative plural; boy: dative singular; park: dative singular",
        ),
        ("She hopes to wait for the children.", "wait: hope to, infinitive; child: accusative plural"),
    ],
)
def test_the_combinations_are_those_of_the_sentence(english, combinations):
    (sentence,) = (s for s in Grammar(lexicon_of(english)).sentences() if s.english == english)
    assert sentence.combinations == {tuple(one.split(": ")) for one in combinations.split("; ")}


def test_training_has_all_words_and_constructions_often(grammar, splits):
    seen, constructions = defaultdict(int), Counter()
    for sentence in splits["train"]:
        for word, use in sentence.combinations:
            seen[word] += 1
            if ", " in use:
                constructions[use] += 1
    for verb in LEXICON.verbs:
        assert seen[verb.english] >= 80, verb.english
    for noun in LEXICON.nouns:
        assert seen[noun.english] >= 50, noun.english
    assert len(constructions) == 14 * 3 - 1 - 2
    assert min(constructions.values()) >= 100
    held_out_words = {word for word, _ in grammar.held_out()}
    assert {verb.english for verb in LEXICON.verbs} <= held_out_words


def test_held_out_combinations_are_asked_for(grammar, splits):
    asked = set().union(*(sentence.combinations for sentence in splits["test"])) & grammar.held_out()
    assert len(asked) > 0.9 * len(grammar.held_out())


def test_no_word_of_validation_and_test_is_new(splits):
    for side in ("english", "german"):
        trained = {word for s in splits["train"] for word in words_of(getattr(s, side))}
        for name in ("validation", "test"):
            assert {word for s in splits[name] for word in words_of(getattr(s, side))} <= trained


def test_most_sentences_need_reordering(splits):
    separable = {verb.english for verb in LEXICON.verbs if verb.prefix}
    in_english_order = 0
    for sentence in splits["train"]:
        verb, cell = next(pair for pair in sentence.combinations if ", " in pair[1])
        straight = cell in ("statement, present", "subject question, present") and verb not in separable
        in_english_order += straight or verb == "be"
    assert 0.05 < in_english_order / 20000 < 0.2


def test_the_corpus_is_the_same_everywhere():
    corpus = make_corpus(train=300, validation=50, test=50, seed=7)
    text = "\n".join(f"{en}\t{de}" for split in (corpus.train, corpus.validation, corpus.test) for en, de in split)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "2fa4d0a1a6b5313ef8fbefed45e4cc4d1f888551f3cf96ade81a4e21304aba76"
    )
    assert make_corpus(train=300, validation=50, test=50, seed=7) == corpus
    assert make_corpus(train=300, validation=50, test=50, seed=8).train != corpus.train


def test_small_and_empty_splits_are_possible():
    assert make_corpus(train=0, validation=0, test=0) == EmbeddedCorpus([], [], [])
    corpus = make_corpus(train=0, validation=3, test=2)
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == (0, 3, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"validation": -1}, r"^the validation split cannot have -1 sentences: ask for 0 or more$"),
        ({"train": 999_999}, r"^1001499 sentences are too many: ask for at most 1000000 in all$"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_corpus(**sizes)


def test_written_files_are_aligned(tmp_path):
    corpus = make_corpus(train=20, validation=5, test=4, seed=2)
    write_corpus(tmp_path / "new" / "folder", corpus)
    for name, pairs in (("train", corpus.train), ("valid", corpus.validation), ("test", corpus.test)):
        lines = [(tmp_path / "new" / "folder" / f"{name}.{side}").read_bytes().decode("utf-8") for side in ("en", "de")]
        assert list(zip(*(text.split("\n") for text in lines), strict=True)) == [*pairs, ("", "")]
