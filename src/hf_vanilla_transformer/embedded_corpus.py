"""A parallel corpus that needs no download: a synchronous grammar of English and German, written by hand.

The grammar speaks of people, animals and things, and asks of a translation model what German asks of all:
gender, case, strong and weak adjectives, agreement, *nicht* and *kein*, the verb in second place and the rest
of it at the very end. It is regular on purpose: a small Transformer learns it in minutes, while a model that
cannot see the source, or the order of its words, cannot know who sees whom.

- One English sentence has one German translation, so that 100 BLEU can be reached: each word has one sense,
  *you* is *du*, the simple past is the Perfekt, and the order of the German middle field is fixed.
- ``count_pairs()`` counts the pairs of the grammar exactly: there are trillions.
- Each test sentence has a combination that training never shows (``Grammar.held_out``): the verb was there,
  and so was the construction, but never the two together; or else a noun and its case.

Sentences have 3 to 16 English words. In nearly nine of ten the German verb leaves its English place.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path

NOMINATIVE, ACCUSATIVE, DATIVE = CASES = ("nominative", "accusative", "dative")
SINGULAR, PLURAL = "singular", "plural"
PRESENT, PERFECT, INFINITIVE, MODAL = "present", "perfect", "infinitive", "modal"
ICH, DU, ER, WIR = range(4)  # the four forms of a German verb here; sie is er or wir

REORDERED_EXAMPLE = "She is happy because the old man wants to give the book to the child today."


# --- The lexicon --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    """One noun; ``oblique`` is what the n-declension makes of it (*den Jungen*); *Tee* has no plural."""

    english: str
    german: str
    gender: str
    oblique: str
    english_plural: str
    german_plural: str
    category: str


@dataclass(frozen=True)
class Adjective:
    """One adjective; ``stem`` takes the endings (*teuer*, but *ein teures Buch*)."""

    english: str
    german: str
    stem: str
    categories: tuple[str, ...]


@dataclass(frozen=True)
class Determiner:
    """One determiner; the ``indefinite`` one vanishes in the plural and is *kein* under negation."""

    singular: str
    plural: str
    stem: str
    indefinite: bool = False


@dataclass(frozen=True)
class Verb:
    """One verb: principal parts and government; *auf* is a ``prefix``, *machen* its ``infinitive``."""

    english: str
    past: str
    particle: str
    preposition: str
    prefix: str
    infinitive: str
    third: str
    participle: str
    german_preposition: str
    objects: tuple[str, ...]
    remarks: frozenset[str]

    @property
    def case(self) -> str:
        return DATIVE if "dative" in self.remarks else ACCUSATIVE

    def present(self, person: int) -> str:
        """Return the finite form without the prefix: *lese, liest, liest, lesen*."""
        stem = self.third.removesuffix("t")
        second = self.third if stem[-1] in "sßxz" else stem + "st"
        return (self.infinitive.removesuffix("n"), second, self.third, self.infinitive)[person]


@dataclass(frozen=True)
class Time:
    """A time adverbial, the tenses it goes with, and whether it sounds odd beside *nicht*."""

    english: str
    german: str
    tenses: tuple[str, ...]
    affirmative_only: bool = False


@dataclass(frozen=True)
class Lexicon:
    """The words of a grammar; ``prepositions`` are (English, German, categories of the place)."""

    nouns: tuple[Noun, ...]
    adjectives: tuple[Adjective, ...]
    determiners: tuple[Determiner, ...]
    verbs: tuple[Verb, ...]
    times: tuple[Time, ...]
    prepositions: tuple[tuple[str, str, tuple[str, ...]], ...]
    pronouns: tuple[str, ...]
    thoughts: tuple[str, ...]


# English[/irregular plural], article, German[/oblique], plural or -
_NOUNS = {
    "person": """
        man/men der Mann Männer; woman/women die Frau Frauen; child/children das Kind Kinder;
        girl das Mädchen Mädchen; boy der Junge/Jungen Jungen; father der Vater Väter;
        mother die Mutter Mütter; brother der Bruder Brüder; sister die Schwester Schwestern;
        son der Sohn Söhne; daughter die Tochter Töchter; uncle der Onkel Onkel; aunt die Tante Tanten;
        friend der Freund Freunde; teacher der Lehrer Lehrer; doctor der Arzt Ärzte;
        king der König Könige; queen die Königin Königinnen; guest der Gast Gäste;
        actress die Schauspielerin Schauspielerinnen; waitress die Kellnerin Kellnerinnen;
        painter der Maler Maler; student der Student/Studenten Studenten;
        princess die Prinzessin Prinzessinnen; grandmother die Großmutter Großmütter;
        grandfather der Großvater Großväter""",
    "animal": """
        dog der Hund Hunde; cat die Katze Katzen; horse das Pferd Pferde; bird der Vogel Vögel;
        mouse/mice die Maus Mäuse; cow die Kuh Kühe; rabbit das Kaninchen Kaninchen""",
    "text": """
        book das Buch Bücher; letter der Brief Briefe; poem das Gedicht Gedichte;
        story die Geschichte Geschichten""",
    "press": """
        newspaper die Zeitung Zeitungen; magazine die Zeitschrift Zeitschriften""",
    "food": """
        apple der Apfel Äpfel; cake der Kuchen Kuchen; egg das Ei Eier; pear die Birne Birnen;
        carrot die Karotte Karotten; tomato die Tomate Tomaten; cookie der Keks Kekse;
        soup die Suppe Suppen""",
    "drink": """
        water das Wasser -; milk die Milch -; coffee der Kaffee -; tea der Tee -; juice der Saft -;
        beer das Bier -; lemonade die Limonade -""",
    "thing": """
        table der Tisch Tische; chair der Stuhl Stühle; lamp die Lampe Lampen; bag die Tasche Taschen;
        ring der Ring Ringe; picture das Bild Bilder; knife/knives das Messer Messer;
        cup die Tasse Tassen; key der Schlüssel Schlüssel; umbrella der Regenschirm Regenschirme;
        flower die Blume Blumen; ball der Ball Bälle; hat der Hut Hüte; gift das Geschenk Geschenke;
        pencil der Bleistift Bleistifte""",
    "machine": """
        car das Auto Autos; bicycle das Fahrrad Fahrräder; clock die Uhr Uhren;
        computer der Computer Computer; camera die Kamera Kameras; radio/radios das Radio Radios""",
    "clothes": """
        dress das Kleid Kleider; coat der Mantel Mäntel; shirt das Hemd Hemden; jacket die Jacke Jacken;
        skirt der Rock Röcke; sweater der Pullover Pullover; shoe der Schuh Schuhe""",
    "door": """
        door die Tür Türen; window das Fenster Fenster; gate das Tor Tore; suitcase der Koffer Koffer;
        box die Kiste Kisten; drawer die Schublade Schubladen""",
    "place": """
        garden der Garten Gärten; kitchen die Küche Küchen; park der Park Parks; city die Stadt Städte;
        forest der Wald Wälder; room das Zimmer Zimmer; village das Dorf Dörfer""",
    "building": """
        house das Haus Häuser; school die Schule Schulen; church die Kirche Kirchen;
        castle das Schloss Schlösser; hotel das Hotel Hotels; museum das Museum Museen;
        library die Bibliothek Bibliotheken""",
}

# English, German[/stem]: what it is said of
_ADJECTIVES = """
    old alt: person animal text press machine thing clothes door place building; young jung: person animal;
    small klein: animal food thing machine door place building;
    big groß: animal food thing door place building; strong stark: person animal;
    hungry hungrig: person animal; friendly freundlich: person; clever klug: person; famous berühmt: person;
    tired müde/müd: person; poor arm: person; rich reich: person; happy glücklich: person;
    sad traurig: person; angry wütend: person; surprised überrascht: person;
    white weiß: animal clothes door machine; black schwarz: animal clothes machine;
    new neu: text press thing machine clothes place building; beautiful schön: thing clothes place building;
    expensive teuer/teur: food drink thing machine clothes; cheap billig: food drink thing machine clothes;
    heavy schwer: thing machine door; red rot: thing clothes; blue blau: thing clothes;
    green grün: thing clothes door; warm warm: drink clothes; long lang: text; short kurz: text;
    interesting interessant: text press; good gut: food drink; fresh frisch: food; cold kalt: drink;
    hot heiß: drink; quiet ruhig: place building; dark dunkel/dunkl: place building"""

# English base and past, ~particle, +preposition | German principal parts, +preposition | objects | remarks.
# "to": takes a recipient as well; "place": happens in places; "animals": they do it too; "state": no modal.
_VERBS = """
read read | lesen liest gelesen | text press | place
write wrote | schreiben schreibt geschrieben | text | place
eat ate | essen isst gegessen | food | place
drink drank | trinken trinkt getrunken | drink | place
order ordered | bestellen bestellt bestellt | food drink |
buy bought | kaufen kauft gekauft | food drink press thing machine clothes | place
sell sold | verkaufen verkauft verkauft | food thing machine clothes | place
find found | finden findet gefunden | person animal thing clothes | place
see saw | sehen sieht gesehen | person animal thing machine | place animals
miss missed | vermissen vermisst vermisst | person animal | state
need needed | brauchen braucht gebraucht | person thing machine clothes | state
look looked +for | suchen sucht gesucht | person animal thing clothes | place
carry carried | tragen trägt getragen | thing |
wash washed | waschen wäscht gewaschen | animal clothes |
draw drew | zeichnen zeichnet gezeichnet | person animal thing place building |
repair repaired | reparieren repariert repariert | machine | place
open opened | auf-machen macht aufgemacht | door |
close closed | zu-machen macht zugemacht | door |
throw threw ~away | weg-werfen wirft weggeworfen | text press thing clothes |
take took ~off | aus-ziehen zieht ausgezogen | clothes |
pick picked ~up | ab-holen holt abgeholt | person |
invite invited | ein-laden lädt eingeladen | person |
call called | an-rufen ruft angerufen | person |
visit visited | besuchen besucht besucht | person |
greet greeted | begrüßen begrüßt begrüßt | person | place
understand understood | verstehen versteht verstanden | person text |
help helped | helfen hilft geholfen | person | dative place
thank thanked | danken dankt gedankt | person | dative
answer answered | antworten antwortet geantwortet | person | dative
congratulate congratulated | gratulieren gratuliert gratuliert | person | dative
follow followed | folgen folgt gefolgt | person animal | dative sein animals
give gave | geben gibt gegeben | text press thing | to
show showed | zeigen zeigt gezeigt | text press thing machine clothes | to
send sent | schicken schickt geschickt | text press clothes | to
bring brought | bringen bringt gebracht | text press thing clothes | to
lend lent | leihen leiht geliehen | machine clothes | to
explain explained | erklären erklärt erklärt | text | to
sleep slept | schlafen schläft geschlafen | | place animals
work worked | arbeiten arbeitet gearbeitet | | place
sing sang | singen singt gesungen | | place
dance danced | tanzen tanzt getanzt | | place
laugh laughed | lachen lacht gelacht | | place
cry cried | weinen weint geweint | | place
get got ~up | auf-stehen steht aufgestanden | | sein
go went +into | gehen geht gegangen +in | place building | sein
run ran +into | laufen läuft gelaufen +in | place building | sein animals
come came +out_of | kommen kommt gekommen +aus | place building | dative sein animals
return returned +from | zurück-kommen kommt zurückgekommen +aus | place building | dative sein
wait waited +for | warten wartet gewartet +auf | person | place
talk talked +to | sprechen spricht gesprochen +mit | person | dative place
think thought +of | denken denkt gedacht +an | person animal place building |
play played +with | spielen spielt gespielt +mit | person animal | dative place animals
"""

# "every day" and its like would need "nicht" before them instead of behind them
_TIMES = (
    Time("today", "heute", (PRESENT, MODAL, INFINITIVE)),
    Time("tonight", "heute Abend", (PRESENT, MODAL, INFINITIVE)),
    Time("tomorrow", "morgen", (MODAL, INFINITIVE)),
    Time("soon", "bald", (MODAL, INFINITIVE), affirmative_only=True),
    Time("next week", "nächste Woche", (MODAL, INFINITIVE)),
    Time("every day", "jeden Tag", (PRESENT,), affirmative_only=True),
    Time("in the morning", "am Morgen", (PRESENT, MODAL, INFINITIVE)),
    Time("in the evening", "am Abend", (PRESENT, MODAL, INFINITIVE)),
    Time("on Monday", "am Montag", (PRESENT, MODAL, INFINITIVE)),
    Time("on Sunday", "am Sonntag", (PRESENT, MODAL, INFINITIVE)),
    Time("yesterday", "gestern", (PERFECT,)),
    Time("recently", "neulich", (PERFECT,), affirmative_only=True),
    Time("last week", "letzte Woche", (PERFECT,)),
    Time("last year", "letztes Jahr", (PERFECT,)),
    Time("last Sunday", "letzten Sonntag", (PERFECT,)),
)

_MODALS = {  # "must" and "may" mean something else under negation
    "can": (("kann", "kannst", "kann", "können"), True),
    "should": (("sollte", "solltest", "sollte", "sollten"), True),
    "want": (("will", "willst", "will", "wollen"), True),
    "must": (("muss", "musst", "muss", "müssen"), False),
    "may": (("darf", "darfst", "darf", "dürfen"), False),
}
_AUXILIARIES = {
    "haben": ("habe", "hast", "hat", "haben"),
    "sein": ("bin", "bist", "ist", "sind"),
}
_WAS = ("war", "warst", "war", "waren")
_BE = {PRESENT: ("am", "are", "is", "are"), PERFECT: ("was", "were", "was", "were")}
_THOUGHTS = {
    "know": ("weiß", "weißt", "weiß", "wissen"),
    "say": ("sage", "sagst", "sagt", "sagen"),
    "believe": ("glaube", "glaubst", "glaubt", "glauben"),
    "hope": ("hoffe", "hoffst", "hofft", "hoffen"),
    "hear": ("höre", "hörst", "hört", "hören"),
    "ask": ("frage", "fragst", "fragt", "fragen"),
}
_MOODS = ("happy", "sad", "angry", "surprised")

# "my man" would be "mein Mann", who is my husband; and nobody has several mothers
_NOBODYS = {SINGULAR: "man woman boy girl", PLURAL: "man woman boy girl father mother king queen"}


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


def _with_s(phrase: str) -> str:
    """Return the regular plural of a noun, or the third person of a verb, which goes the same way."""
    head, _, tail = phrase.partition(" ")
    if head.endswith("y") and head[-2] not in "aeiou":
        head = head[:-1] + "ie"
    return _join(head + ("es" if head.endswith(("s", "sh", "ch", "x", "o")) else "s"), tail)


def _read_nouns() -> Iterator[Noun]:
    for category, table in _NOUNS.items():
        for entry in table.split(";"):
            names, gender, german, german_plural = entry.split()
            english, _, irregular = names.partition("/")
            nominative, _, oblique = german.partition("/")
            plurals = ("", "") if german_plural == "-" else (irregular or _with_s(english), german_plural)
            yield Noun(english, nominative, gender, oblique or nominative, *plurals, category)


def _read_adjectives() -> Iterator[Adjective]:
    for entry in _ADJECTIVES.split(";"):
        names, categories = entry.split(":")
        english, german = names.split()
        predicative, _, stem = german.partition("/")
        yield Adjective(english, predicative, stem or predicative, tuple(categories.split()))


def _marked(words: list[str], mark: str) -> str:
    return next((word[1:].replace("_", " ") for word in words if word[0] == mark), "")


def _read_verbs() -> Iterator[Verb]:
    for line in _VERBS.strip().splitlines():
        english, german, objects, remarks = (column.split() for column in line.split("|"))
        prefix, _, infinitive = german[0].rpartition("-")
        yield Verb(
            english=english[0],
            past=english[1],
            particle=_marked(english, "~"),
            preposition=_marked(english, "+"),
            prefix=prefix,
            infinitive=infinitive,
            third=german[1],
            participle=german[2],
            german_preposition=_marked(german, "+"),
            objects=tuple(objects),
            remarks=frozenset(remarks),
        )


_BE_VERB = Verb("be", "", "", "", "", "sein", "ist", "gewesen", "", (), frozenset())

LEXICON = Lexicon(
    nouns=tuple(_read_nouns()),
    adjectives=tuple(_read_adjectives()),
    determiners=(
        Determiner("the", "the", "d"),
        Determiner("this", "these", "dies"),
        Determiner("my", "my", "mein"),
        Determiner("our", "our", "unser"),
        Determiner("a", "", "ein", indefinite=True),
    ),
    verbs=tuple(_read_verbs()),
    times=_TIMES,
    prepositions=(
        ("in", "in", ("place", "building")),
        ("behind", "hinter", ("building",)),
        ("beside", "neben", ("building",)),
    ),
    pronouns=("I", "you", "he", "she", "we", "they"),
    thoughts=tuple(_THOUGHTS),
)


# --- Noun phrases -------------------------------------------------------------------------------------------

# The strong endings: der, die, das and dieser, diese, dieses show them; columns by gender, then the plural.
_STRONG = {
    NOMINATIVE: {"der": "er", "die": "e", "das": "es", PLURAL: "e"},
    ACCUSATIVE: {"der": "en", "die": "e", "das": "es", PLURAL: "e"},
    DATIVE: {"der": "em", "die": "er", "das": "em", PLURAL: "en"},
}
_THE = {"er": "der", "e": "die", "es": "das", "en": "den", "em": "dem"}
_EIN_WORDS = ("ein", "kein", "mein", "unser")
_EIN_WITHOUT_ENDING = ((NOMINATIVE, "der"), (NOMINATIVE, "das"), (ACCUSATIVE, "das"))
_WEAK_IN_E = (
    *((NOMINATIVE, gender) for gender in ("der", "die", "das")),
    (ACCUSATIVE, "die"),
    (ACCUSATIVE, "das"),
)


def german_noun_phrase(stem: str, adjective: Adjective | None, noun: Noun, number: str, case: str) -> str:
    """Decline determiner, adjective and noun: *ein alter Mann, dem alten Mann, alte Männer, kalter Tee*.

    One rule makes all three adjective declensions: the strong ending is shown once, by the determiner if it
    can, else by the adjective; an adjective behind a strong ending is weak. ``stem`` is ``"d"`` for the
    definite article and empty for none, ``number`` is singular or plural, ``case`` one of ``CASES``.
    """
    column = noun.gender if number == SINGULAR else PLURAL
    strong, weak = _STRONG[case][column], "e" if (case, column) in _WEAK_IN_E else "en"
    shows_ending = bool(stem) and not (stem in _EIN_WORDS and (case, column) in _EIN_WITHOUT_ENDING)
    article = _THE[strong] if stem == "d" else stem + strong * shows_ending
    inflected = adjective.stem + (weak if shows_ending else strong) if adjective else ""
    return _join(article, inflected, _german_noun(noun, number, case))


def _german_noun(noun: Noun, number: str, case: str) -> str:
    if number == SINGULAR:
        return noun.german if case == NOMINATIVE else noun.oblique
    ends_in_n = case == DATIVE and noun.german_plural[-1] not in "ns"
    return noun.german_plural + "n" * ends_in_n


@dataclass(frozen=True)
class Phrase:
    """Anything that can be subject or object; ``with_kein`` is what negation makes of it in German."""

    english: str
    english_object: str
    german: dict[str, str]
    person: int
    definite: bool = True
    with_kein: dict[str, str] = field(default_factory=dict)
    noun: str = ""
    number: str = ""


def _pronoun(subject: str, obj: str, person: int, *german: str) -> Phrase:
    return Phrase(subject, obj, dict(zip(CASES, german, strict=True)), person)


_PRONOUNS = (
    _pronoun("I", "me", ICH, "ich", "mich", "mir"),
    _pronoun("you", "you", DU, "du", "dich", "dir"),
    _pronoun("he", "him", ER, "er", "ihn", "ihm"),
    _pronoun("she", "her", ER, "sie", "sie", "ihr"),
    _pronoun("we", "us", WIR, "wir", "uns", "uns"),
    _pronoun("they", "them", WIR, "sie", "sie", "ihnen"),
)
_THIRD_PERSONS = tuple(pronoun for pronoun in _PRONOUNS if pronoun.english in ("he", "she", "they"))
_WHO = _pronoun("who", "who", ER, "wer", "wen", "wem")
_WHAT = _pronoun("what", "what", ER, "was", "was", "was")


def _noun_phrase(determiner: Determiner, adjective: Adjective | None, noun: Noun, number: str) -> Phrase:
    singular = number == SINGULAR
    article = determiner.singular if singular else determiner.plural
    stem = determiner.stem
    if determiner.indefinite and not (singular and noun.english_plural):
        article = stem = ""
    head = _join(adjective.english if adjective else "", noun.english if singular else noun.english_plural)
    if article == "a" and head[0] in "aeiou":
        article = "an"
    german = {case: german_noun_phrase(stem, adjective, noun, number, case) for case in CASES}
    with_kein = {}
    if determiner.indefinite:
        with_kein = {case: german_noun_phrase("kein", adjective, noun, number, case) for case in CASES}
    english, person = _join(article, head), ER if singular else WIR
    return Phrase(english, english, german, person, not determiner.indefinite, with_kein, noun.english, number)


# --- The clause in both languages ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place adverbial: *in the garden, im Garten*."""

    english: str
    german: str
    noun: str
    number: str = SINGULAR


@dataclass(frozen=True)
class Clause:
    """Who does what to whom, where and when; the construction says what becomes of it."""

    verb: Verb
    tense: str
    negated: bool
    subject: Phrase
    object: Phrase | None = None
    recipient: Phrase | None = None
    predicate: Adjective | None = None
    place: Place | None = None
    time: Time | None = None


def _english_verb(clause: Clause, *, wants_auxiliary: bool) -> tuple[str, str]:
    """Return (auxiliary, rest); *do* steps in where negation or a question needs an auxiliary."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    if verb.english == "be":
        return _BE[tense][person], ""
    if tense in _MODALS and tense != "want":
        return tense, verb.english
    infinitive = f"want to {verb.english}" if tense == "want" else verb.english
    if wants_auxiliary:
        return "did" if tense == PERFECT else "does" if person == ER else "do", infinitive
    if tense == PERFECT:
        return "", verb.past
    return "", _with_s(infinitive) if person == ER else infinitive


def _english_rest(clause: Clause) -> str:
    """What follows the English verb; an object that is asked for has left."""
    return _join(
        clause.verb.preposition,
        clause.object.english_object if clause.object else "",
        clause.verb.particle,
        f"to {clause.recipient.english_object}" if clause.recipient else "",
        clause.predicate.english if clause.predicate else "",
        clause.place.english if clause.place else "",
        clause.time.english if clause.time else "",
    )


def _english_statement(clause: Clause) -> str:
    auxiliary, rest = _english_verb(clause, wants_auxiliary=clause.negated)
    finite = _join(auxiliary, "not" if clause.negated else "").replace("can not", "cannot")
    return _join(clause.subject.english, finite, rest, _english_rest(clause))


def _english_question(clause: Clause) -> str:
    auxiliary, rest = _english_verb(clause, wants_auxiliary=True)
    return _join(auxiliary, clause.subject.english, "not" if clause.negated else "", rest, _english_rest(clause))


def _bracket(clause: Clause) -> tuple[str, str, str]:
    """Return the sentence bracket: left part, right part, and both as they meet at the end of a subclause."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    if verb.english == "be":
        form = (_AUXILIARIES["sein"] if tense == PRESENT else _WAS)[person]
        return form, "", form
    if tense == PRESENT:
        form = verb.present(person)
        return form, verb.prefix, verb.prefix + form
    if tense == PERFECT:
        left, right = _AUXILIARIES["sein" if "sein" in verb.remarks else "haben"][person], verb.participle
    else:
        left, right = _MODALS[tense][0][person], verb.prefix + verb.infinitive
    return left, right, f"{right} {left}"


def _contracted(preposition: str, german: str) -> str:
    return f"{preposition} {german}".replace("in dem ", "im ").replace("in das ", "ins ")


def _governed(verb: Verb, phrase: Phrase) -> str:
    """Return the object in its case, behind the verb's own preposition if it has one: *auf den Freund*."""
    german = phrase.german[verb.case]
    return _contracted(verb.german_preposition, german) if verb.german_preposition else german


def _middle_field(clause: Clause) -> str:
    """Return known objects, time, *nicht*, place, new objects, and last what belongs closest to the verb.

    What is known stands before the time and what is new behind it: *das Buch heute*, but *heute ein Buch*.
    """
    known, new, closest = "", "", clause.predicate.german if clause.predicate else ""
    negation = "nicht" if clause.negated else ""
    if clause.object and clause.verb.german_preposition:
        closest = _governed(clause.verb, clause.object)
    elif clause.object and clause.object.definite:
        known = _governed(clause.verb, clause.object)
    elif clause.object:
        new = (clause.object.with_kein if clause.negated else clause.object.german)[clause.verb.case]
        negation = ""
    return _join(
        clause.recipient.german[DATIVE] if clause.recipient else "",
        known,
        clause.time.german if clause.time else "",
        negation,
        clause.place.german if clause.place else "",
        new,
        closest,
    )


def _verb_second(clause: Clause) -> str:
    left, right, _ = _bracket(clause)
    return _join(clause.subject.german[NOMINATIVE], left, _middle_field(clause), right)


def _verb_first(clause: Clause) -> str:
    """Return the clause from its finite verb on: a question, or what follows a fronted adverbial."""
    left, right, _ = _bracket(clause)
    return _join(left, clause.subject.german[NOMINATIVE], _middle_field(clause), right)


def _verb_last(clause: Clause) -> str:
    return _join(clause.subject.german[NOMINATIVE], _middle_field(clause), _bracket(clause)[2])


# --- The constructions: from a clause to a sentence ---------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """The main clause around a subclause: *she is happy*, *sie ist glücklich*, *ist sie glücklich*."""

    english: str
    german: str
    inverted: str


Pair = tuple[str, str]
Render = Callable[[Clause, Opening], Pair]


def _statement(clause: Clause, _: Opening) -> Pair:
    return f"{_english_statement(clause)}.", f"{_verb_second(clause)}."


def _fronted_time(clause: Clause, _: Opening) -> Pair:
    rest = replace(clause, time=None)
    return f"{clause.time.english} {_english_statement(rest)}.", f"{clause.time.german} {_verb_first(rest)}."


def _fronted_place(clause: Clause, _: Opening) -> Pair:
    rest = replace(clause, place=None)
    return (
        f"{clause.place.english} {_english_statement(rest)}.",
        f"{clause.place.german} {_verb_first(rest)}.",
    )


def _question(english: str = "", german: str = "") -> Render:
    def render(clause: Clause, _: Opening) -> Pair:
        return _join(english, f"{_english_question(clause)}?"), _join(german, f"{_verb_first(clause)}?")

    return render


def _subject_question(clause: Clause, _: Opening) -> Pair:
    return f"{_english_statement(clause)}?", f"{_verb_second(clause)}?"


def _object_question(clause: Clause, opening: Opening) -> Pair:
    asked = _governed(clause.verb, clause.object)
    return _question(clause.object.english, asked)(replace(clause, object=None), opening)


def _subclause(english: str, german: str) -> Render:
    def render(clause: Clause, opening: Opening) -> Pair:
        return (
            f"{opening.english} {english} {_english_statement(clause)}.",
            f"{opening.german}, {german} {_verb_last(clause)}.",
        )

    return render


def _if_clause(clause: Clause, opening: Opening) -> Pair:
    return (
        f"if {_english_statement(clause)}, {opening.english}.",
        f"wenn {_verb_last(clause)}, {opening.inverted}.",
    )


def _hope_to(clause: Clause, _: Opening) -> Pair:
    subject, verb = clause.subject, clause.verb
    hope = "hopes" if subject.person == ER else "hope"
    infinitive = f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"
    return (
        _join(subject.english, hope, "to", verb.english, _english_rest(clause)) + ".",
        f"{subject.german[NOMINATIVE]} {_THOUGHTS['hope'][subject.person]}, "
        f"{_join(_middle_field(clause), infinitive)}.",
    )


_NEVER, _MAYBE, _ALWAYS = (False,), (False, True), (True,)
_FINITE = (PRESENT, PERFECT, *_MODALS)
_PLAIN = (PRESENT, PERFECT)
_NEGATABLE = (*_PLAIN, *(modal for modal, (_, negatable) in _MODALS.items() if negatable))


@dataclass(frozen=True)
class Construction:
    """A kind of sentence and what may stand in it, within sixteen words; ``weight`` is its frequency."""

    name: str
    render: Render
    weight: int = 1
    tenses: tuple[str, ...] = _FINITE
    negatable: tuple[str, ...] = ()
    time: tuple[bool, ...] = _MAYBE
    place: tuple[bool, ...] = _MAYBE
    asks: str = ""
    opening: str = ""
    takes_be: bool = False


_CONSTRUCTIONS = (
    Construction("statement", _statement, 3, negatable=_NEGATABLE, takes_be=True),
    Construction("fronted time", _fronted_time, 3, negatable=_NEGATABLE, time=_ALWAYS),
    Construction("fronted place", _fronted_place, negatable=_NEGATABLE, place=_ALWAYS),
    Construction("yes-no question", _question(), 2, takes_be=True),
    Construction("why question", _question("why", "warum"), 1, _FINITE, _PLAIN, place=_NEVER, takes_be=True),
    Construction("when question", _question("when", "wann"), time=_NEVER),
    Construction("where question", _question("where", "wo"), place=_NEVER, asks="place"),
    Construction("subject question", _subject_question, asks="subject"),
    Construction("object question", _object_question, asks="object"),
    Construction("that clause", _subclause("that", "dass"), 2, _FINITE, _PLAIN, opening="that", takes_be=True),
    Construction("whether clause", _subclause("whether", "ob"), 2, _FINITE, _PLAIN, opening="whether", takes_be=True),
    Construction("because clause", _subclause("because", "weil"), 2, _FINITE, _PLAIN, opening="mood", takes_be=True),
    Construction("if clause", _if_clause, 2, (PRESENT, "can", "want", "must"), (PRESENT,), opening="mood"),
    Construction("hope to", _hope_to, tenses=(INFINITIVE,)),
)
_DRAWN = tuple(construction for construction in _CONSTRUCTIONS for _ in range(construction.weight))


# --- The grammar: what goes with what -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sentence:
    """A pair of sentences and what it combines: its verb with a construction, its nouns with cases."""

    english: str
    german: str
    combinations: frozenset[tuple[str, str]]


class Slot:
    """The choices for one part of a clause. A group is drawn first, lest the few pronouns drown."""

    def __init__(self, *groups: Iterable):
        self.groups = [group for group in map(tuple, groups) if group]
        self.size = sum(map(len, self.groups))
        self.nouns = Counter(choice.noun for choice in self if isinstance(choice, Phrase) and choice.noun)

    def __iter__(self) -> Iterator:
        return chain.from_iterable(self.groups)

    def draw(self, rng: random.Random) -> object:
        return _pick(rng, _pick(rng, self.groups))


def _pick(rng: random.Random, choices: Sequence):
    # random() is the only method whose numbers Python promises to keep in later versions
    return choices[int(rng.random() * len(choices))]


_NOTHING = Slot([None])


@dataclass(frozen=True)
class Pattern:
    """A verb in a construction and a tense: a choice from each slot makes a sentence."""

    construction: Construction
    verb: Verb
    tense: str
    negated: bool
    subjects: Slot
    objects: Slot
    recipients: Slot
    predicates: Slot
    adverbials: Slot
    openings: Slot

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.subjects, self.objects, self.recipients, self.predicates, self.adverbials, self.openings

    @property
    def cell(self) -> str:
        return f"{self.construction.name}, {MODAL if self.tense in _MODALS else self.tense}"

    def count(self) -> int:
        """Return the product of the slots, less the choices in which a noun meets itself (see ``build``).

        Objects of a verb with a recipient are things, so that no choice is taken off twice.
        """
        subjects, objects, recipients = self.subjects, self.objects, self.recipients
        people = subjects.size * objects.size * recipients.size
        for noun, times in subjects.nouns.items():
            people -= times * (objects.nouns[noun] * recipients.size + recipients.nouns[noun] * objects.size)
        return people * self.predicates.size * self.adverbials.size * self.openings.size

    def build(self, choices: Sequence) -> Sentence | None:
        """Return the sentence, or None if it said that *the man sees the man*."""
        subject, obj, recipient, predicate, (place, time), opening = choices
        if subject.noun and any(other and other.noun == subject.noun for other in (obj, recipient)):
            return None
        clause = Clause(self.verb, self.tense, self.negated, subject, obj, recipient, predicate, place, time)
        combinations = {(self.verb.english, self.cell)}
        for phrase, case in (
            (subject, NOMINATIVE),
            (obj, self.verb.case),
            (recipient, DATIVE),
            (place, DATIVE),
        ):
            if phrase and phrase.noun:
                combinations.add((phrase.noun, f"{case} {phrase.number}"))
        english, german = (text[0].upper() + text[1:] for text in self.construction.render(clause, opening))
        return Sentence(english, german, frozenset(combinations))


class Grammar:
    """All sentences that a lexicon gives: ``count`` them, walk through all ``sentences``, or ``draw`` one."""

    def __init__(self, lexicon: Lexicon):
        self._lexicon = lexicon
        self._pronouns = [pronoun for pronoun in _PRONOUNS if pronoun.english in lexicon.pronouns]
        self._phrases: dict[tuple[str, bool], list[Phrase]] = defaultdict(list)
        for noun in lexicon.nouns:
            self._add_phrases(noun)
        self._places = list(self._all_places())
        self._openings = {
            "": _NOTHING,
            "that": Slot(self._thoughts(thought for thought in lexicon.thoughts if thought != "ask")),
            "whether": Slot(self._thoughts(thought for thought in lexicon.thoughts if thought == "ask")),
            "mood": Slot(self._moods()),
        }
        self._slots: dict[tuple, Slot] = {}
        self._patterns = [pattern for pattern in self._all_patterns() if all(slot.size for slot in pattern.slots)]
        self._by_name: dict[str, dict[str, dict[bool, list[Pattern]]]] = {}
        for pattern in self._patterns:
            cells = self._by_name.setdefault(pattern.construction.name, {})
            cells.setdefault(pattern.cell, {}).setdefault(pattern.negated, []).append(pattern)

    def count(self) -> int:
        """Return the exact number of sentences."""
        return sum(pattern.count() for pattern in self._patterns)

    def sentences(self) -> Iterator[Sentence]:
        """Yield every sentence; only a small lexicon comes to an end."""
        for pattern in self._patterns:
            yield from filter(None, map(pattern.build, product(*pattern.slots)))

    def draw(self, rng: random.Random) -> Sentence:
        """Return a random sentence, negated in a fifth of the cases that allow it."""
        while True:
            cells = tuple(self._by_name[_pick(rng, _DRAWN).name].values())
            by_negation = _pick(rng, cells)
            pattern = _pick(rng, by_negation[True in by_negation and rng.random() < 0.2])
            sentence = pattern.build([slot.draw(rng) for slot in pattern.slots])
            if sentence is not None:
                return sentence

    def held_out(self) -> frozenset[tuple[str, str]]:
        """Return what is kept for the test: two constructions of each verb, and some nouns in some cases.

        What is spelt in one construction only must stay in training: *aufzumachen*, and *Liest …?* with its
        capital.
        """
        cells: dict[str, dict[str, None]] = defaultdict(dict)
        for pattern in self._patterns:
            is_spelling = pattern.cell == "yes-no question, present" or (
                pattern.verb.prefix and pattern.tense == INFINITIVE
            )
            if not is_spelling:
                cells[pattern.verb.english][pattern.cell] = None
        held_out = {(noun, f"{case} {SINGULAR}") for case, nouns in _HELD_OUT.items() for noun in nouns.split()}
        for number, verb in enumerate(self._lexicon.verbs):
            choices = tuple(cells[verb.english])
            for step in (0, len(choices) // 2):
                held_out.add((verb.english, choices[(5 * number + step) % len(choices)]))
        return frozenset(held_out)

    def _adjectives(self, category: str) -> list[Adjective]:
        return [adjective for adjective in self._lexicon.adjectives if category in adjective.categories]

    def _add_phrases(self, noun: Noun) -> None:
        adjectives = (None, *self._adjectives(noun.category))
        numbers = (SINGULAR, PLURAL) if noun.english_plural else (SINGULAR,)
        for determiner, number, adjective in product(self._lexicon.determiners, numbers, adjectives):
            if not (determiner.singular in ("my", "our") and noun.english in _NOBODYS[number].split()):
                phrase = _noun_phrase(determiner, adjective, noun, number)
                self._phrases[noun.category, adjective is not None].append(phrase)

    def _all_places(self) -> Iterator[Place]:
        for (english, german, categories), noun in product(self._lexicon.prepositions, self._lexicon.nouns):
            for determiner in self._lexicon.determiners:
                if noun.category in categories and determiner.singular in ("the", "this", "our"):
                    phrase = _noun_phrase(determiner, None, noun, SINGULAR)
                    in_german = _contracted(german, phrase.german[DATIVE])
                    yield Place(f"{english} {phrase.english}", in_german, noun.english)

    def _thoughts(self, thoughts: Iterable[str]) -> Iterator[Opening]:
        for thought, pronoun in product(thoughts, self._pronouns):
            english = _with_s(thought) if pronoun.person == ER else thought
            subject, verb = pronoun.german[NOMINATIVE], _THOUGHTS[thought][pronoun.person]
            yield Opening(f"{pronoun.english} {english}", f"{subject} {verb}", f"{verb} {subject}")

    def _moods(self) -> Iterator[Opening]:
        moods = [adjective for adjective in self._lexicon.adjectives if adjective.english in _MOODS]
        for mood, pronoun in product(moods, self._pronouns):
            english = f"{pronoun.english} {_BE[PRESENT][pronoun.person]} {mood.english}"
            subject, verb = pronoun.german[NOMINATIVE], _AUXILIARIES["sein"][pronoun.person]
            yield Opening(english, f"{subject} {verb} {mood.german}", f"{verb} {subject} {mood.german}")

    def _all_patterns(self) -> Iterator[Pattern]:
        categories = dict.fromkeys(noun.category for noun in self._lexicon.nouns)
        for construction in _CONSTRUCTIONS:
            for tense, negated in product(construction.tenses, (False, True)):
                if negated and tense not in construction.negatable:
                    continue
                for verb in self._lexicon.verbs:
                    elsewhere = construction.asks == "place" and "place" not in verb.remarks
                    if not elsewhere and (tense in _PLAIN or "state" not in verb.remarks):
                        yield self._pattern(construction, verb, tense, negated)
                if construction.takes_be and tense in _PLAIN:
                    yield from (self._be(construction, category, tense, negated) for category in categories)

    def _pattern(self, construction: Construction, verb: Verb, tense: str, negated: bool) -> Pattern:
        gives, animals = "to" in verb.remarks, "animals" in verb.remarks and tense != INFINITIVE
        subjects, objects, recipients = _NOTHING, _NOTHING, _NOTHING
        if construction.asks == "subject":
            subjects = Slot([_WHO])
        else:
            subjects = self._slot(("person", "animal")[: 1 + animals], _PRONOUNS, described=True, known=negated)
        if construction.asks == "object":
            objects = Slot(_questioned(verb))
        elif verb.objects:
            known = bool(verb.german_preposition)
            objects = self._slot(verb.objects, _THIRD_PERSONS, described=not gives, known=known)
        if gives:
            recipients = self._slot(("person",), _THIRD_PERSONS, described=False, known=True)
        adverbials = self._adverbials(construction, verb, tense, negated)
        openings = self._openings[construction.opening]
        return Pattern(
            construction, verb, tense, negated, subjects, objects, recipients, _NOTHING, adverbials, openings
        )

    def _be(self, construction: Construction, category: str, tense: str, negated: bool) -> Pattern:
        subjects = self._slot((category,), _PRONOUNS, described=False, known=True)
        predicates, openings = Slot(self._adjectives(category)), self._openings[construction.opening]
        adverbials = Slot([(None, None)])
        return Pattern(
            construction,
            _BE_VERB,
            tense,
            negated,
            subjects,
            _NOTHING,
            _NOTHING,
            predicates,
            adverbials,
            openings,
        )

    def _slot(self, categories: tuple[str, ...], pronouns: Sequence[Phrase], *, described: bool, known: bool) -> Slot:
        """Return pronouns (for people) and noun phrases: some ``described``, or only ``known`` ones."""
        key = (categories, len(pronouns), described, known)
        if key not in self._slots:
            groups = [[p for p in self._pronouns if p in pronouns and "person" in categories]]
            for with_adjective in (False, True)[: 1 + described]:
                phrases = chain.from_iterable(self._phrases[category, with_adjective] for category in categories)
                groups.append([phrase for phrase in phrases if phrase.definite or not known])
            self._slots[key] = Slot(*groups)
        return self._slots[key]

    def _adverbials(self, construction: Construction, verb: Verb, tense: str, negated: bool) -> Slot:
        """Return the (place, time) pairs that go with verb and tense and keep the sentence in its bounds.

        *They read books* may be past or present: every past has a time, unless the time is asked for.
        """
        key = (construction.name, "place" in verb.remarks, bool(verb.objects), tense, negated)
        if key not in self._slots:
            times = [time for time in self._times(tense, negated) if not (construction.opening and " " in time.english)]
            groups = []
            for has_place, has_time in product(construction.place, construction.time):
                too_long = has_place and ((has_time and tense in _MODALS) or construction.opening)
                too_bare = not (has_place or has_time or verb.objects) and construction.place == construction.time
                timeless_past = tense == PERFECT and not has_time and construction.time != _NEVER
                no_place = has_place and "place" not in verb.remarks
                if not (too_long or too_bare or timeless_past or no_place):
                    groups.append(product(self._places if has_place else [None], times if has_time else [None]))
            self._slots[key] = Slot(*groups)
        return self._slots[key]

    def _times(self, tense: str, negated: bool) -> Iterator[Time]:
        spoken = MODAL if tense in _MODALS else tense
        for time in self._lexicon.times:
            if spoken in time.tenses and not (negated and time.affirmative_only):
                yield time


def _questioned(verb: Verb) -> list[Phrase]:
    """Return what can be asked of a verb; *worauf* and *wohin* are left out."""
    things = set(verb.objects) - {"person"} and not verb.german_preposition
    return [_WHO] * ("person" in verb.objects) + [_WHAT] * bool(things)


def count_pairs(lexicon: Lexicon = LEXICON) -> int:
    """Return exactly how many sentence pairs the grammar has, by multiplying choices."""
    return Grammar(lexicon).count()


# --- The corpus ---------------------------------------------------------------------------------------------

# Singulars that training spells alike in another case. Places are often datives, people and animals anything.
_HELD_OUT = {
    NOMINATIVE: "bird table clock shirt",
    ACCUSATIVE: "child brother queen guest dog garden castle library",
    DATIVE: "woman boy daughter uncle princess",
}
MOST_SENTENCES = 1_000_000
KNOWN_WORDS_FROM = 5000  # a training split of this size has nearly all words, so that the others can do with them


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Three lists of (english, german); no sentence stands in two of them, or twice in one."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def draw_splits(*, train: int, validation: int, test: int, seed: int) -> dict[str, list[Sentence]]:
    """Draw the sentences of ``make_corpus``, with the combinations that show what the test split asks for.

    Raises:
        ValueError: a size is negative, or all sizes together exceed a million.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"the {name} split cannot have {size} sentences: ask for 0 or more")
    if sum(sizes.values()) > MOST_SENTENCES:
        raise ValueError(f"{sum(sizes.values())} sentences are too many: ask for at most {MOST_SENTENCES} in all")
    grammar, rng = Grammar(LEXICON), random.Random(seed)
    held_out = grammar.held_out()
    splits: dict[str, list[Sentence]] = {name: [] for name in sizes}
    seen: set[str] = set()
    words: set[str] = set()
    while any(len(splits[name]) < sizes[name] for name in sizes):
        sentence = grammar.draw(rng)
        kept = ("train", "validation") if held_out.isdisjoint(sentence.combinations) else ("test",)
        name = next((name for name in kept if len(splits[name]) < sizes[name]), None)
        spelt = _words(sentence)
        if name == "train":
            words |= spelt
        elif len(splits["train"]) < train or (train >= KNOWN_WORDS_FROM and not spelt <= words):
            continue
        if name is not None and sentence.english not in seen:
            seen.add(sentence.english)
            splits[name].append(sentence)
    return splits


def _words(sentence: Sentence) -> set[str]:
    return {word.strip(".,?") for word in f"{sentence.english} {sentence.german}".split()}


def make_corpus(*, train: int = 20000, validation: int = 500, test: int = 1000, seed: int = 0) -> EmbeddedCorpus:
    """Return a corpus of so many sentences; a seed gives the same corpus on every machine and Python.

    Training and validation are drawn alike. Each test sentence has a verb in a construction, or a noun in a
    case, in which neither of them ever shows it. From 5000 training sentences on, the other splits have no
    word that training lacks.

    Raises:
        ValueError: as ``draw_splits``.
    """
    splits = draw_splits(train=train, validation=validation, test=test, seed=seed)
    return EmbeddedCorpus(**{name: [(s.english, s.german) for s in split] for name, split in splits.items()})


def write_corpus(folder: str | Path, corpus: EmbeddedCorpus) -> None:
    """Write ``train``, ``valid`` and ``test`` as aligned UTF-8 lines in ``.en`` and ``.de`` files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", corpus.train), ("valid", corpus.validation), ("test", corpus.test)):
        for side, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{name}.{language}").write_bytes(lines.encode("utf-8"))
