"""Scores of translations: the number, the signature that makes it repeatable, whether a difference is real.

Two protocols, never to be mixed in one table:

* sacreBLEU on raw text (Post 2018, https://aclanthology.org/W18-6319): BLEU (13a, cased), chrF2 and TER. BLEU counts
  words, which the text of some languages does not tell: there it counts what `BLEU_TOKENIZERS` names.
* P1 of Multi30k, what its papers report: BLEU of `multi-bleu.perl` on lower-cased Moses tokens, against the
  lines of `task1/tok`.

`Bleu`, `Chrf` and `Ter` are `evaluate.Metric` classes for those who want `add_batch` or `evaluate.combine`;
they need no Hub. `score` gives the same numbers without a cache folder. This module knows nothing of models
or tokenizers.

A hypothesis is one string per sentence. A reference is one string per sentence, or a list of strings where a
sentence has several.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import evaluate
import numpy as np
from datasets import Features, List, Value
from sacrebleu.metrics import BLEU, CHRF, TER

from .errors import UserError

P1_LANGUAGES = ("cs", "de", "en", "fr")


def _multi_bleu() -> BLEU:
    return BLEU(lowercase=True, tokenize="none", smooth_method="none", force=True)


# sacreBLEU's tokenizers by language, without its Japanese one, which needs a dictionary. The signature names it.
BLEU_TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya"), "char"),
}
_METRICS = {"bleu": BLEU, "chrf": CHRF, "ter": TER, "p1": _multi_bleu}
_LABELS = {"bleu": "BLEU", "chrf": "chrF2", "p1": "P1 BLEU"}
_DETAILS = {
    "BLEU": ("counts", "totals", "precisions", "bp", "sys_len", "ref_len"),
    "chrF2": (),
    "TER": ("num_edits", "ref_length"),
}


def _checked_lines(lines: Iterable[str] | None, what: str) -> list[str]:
    if isinstance(lines, str):
        raise UserError(f"the {what} are one string: pass a list with one string per sentence")
    lines = [] if lines is None else list(lines)
    if not lines:
        raise UserError(f"there are no {what} to score: the list is empty")
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise UserError(f"line {number} of the {what} is {line!r}: every line must be a string")
    return lines


def _checked_references(references: Iterable | None) -> list[list[str]]:
    if isinstance(references, str):
        raise UserError("the references are one string: pass a list with one entry per sentence")
    per_sentence = []
    for number, entry in enumerate([] if references is None else references, start=1):
        texts = list(entry) if isinstance(entry, Iterable) and not isinstance(entry, str) else [entry]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(f"line {number} of the references is {entry!r}: give a string or a list of strings")
        per_sentence.append(texts)
    return per_sentence


def _checked_pair(
    hypotheses: Iterable[str] | None, references: Iterable | None, what: str = "hypotheses"
) -> tuple[list[str], list[list[str]]]:
    lines, per_sentence = _checked_lines(hypotheses, what), _checked_references(references)
    if len(lines) != len(per_sentence):
        raise UserError(
            f"{len(lines)} {what} but {len(per_sentence)} references: give one reference entry per hypothesis"
        )
    return lines, per_sentence


def _check_p1_references(per_sentence: list[list[str]]) -> None:
    for number, texts in enumerate(per_sentence, start=1):
        for text in texts:
            if text != text.lower():
                raise UserError(
                    f"line {number} of the P1 references has capitals: {text!r}; "
                    "P1 is scored against the lower-cased tokenised lines (Multi30k task1/tok)"
                )


def _scorer(name: str, per_sentence: list[list[str]], target_lang: str | None) -> BLEU | CHRF | TER:
    if name == "p1":
        _check_p1_references(per_sentence)
    if name == "bleu" and target_lang:
        language = re.split("[-_]", target_lang.lower())[0]
        return BLEU(tokenize=BLEU_TOKENIZERS.get(language))
    return _METRICS[name]()


def _streams(per_sentence: list[list[str]]) -> list[tuple[str | None, ...]]:
    return list(zip_longest(*per_sentence))


def _signature(name: str, scorer: BLEU | CHRF | TER, **additions: int | str) -> str:
    signature = scorer.get_signature()
    for key, value in additions.items():
        signature.update(key, value)
    return f"P1|{signature}" if name == "p1" else str(signature)


def _corpus_score(
    name: str, hypotheses: Iterable[str] | None, references: Iterable | None, target_lang: str | None = None
) -> dict:
    lines, per_sentence = _checked_pair(hypotheses, references)
    scorer = _scorer(name, per_sentence, target_lang)
    result = scorer.corpus_score(lines, _streams(per_sentence))
    details = {detail: getattr(result, detail) for detail in _DETAILS[result.name]}
    return {"score": float(result.score), "signature": _signature(name, scorer), **details}


def score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu", "chrf", "ter"),
    target_lang: str | None = None,
) -> dict[str, dict]:
    """Score a corpus by several metrics at once.

    Args:
        hypotheses: translations, one string per sentence; raw text, except for `"p1"`, which takes tokens.
        references: one string or one list of strings per sentence.
        metrics: any of `"bleu"`, `"chrf"`, `"ter"` (sacreBLEU's defaults) and `"p1"`.
        target_lang: such as "zh" or "zh-TW": decides what BLEU counts, see `BLEU_TOKENIZERS`; None means 13a.

    Returns:
        For each metric `{"score", "signature"}`, score in points (0 to 100; TER is an error rate, lower is
        better and may pass 100). BLEU adds `counts`, `totals`, `precisions` (percent), `bp`, `sys_len` and
        `ref_len` (tokens); TER adds `num_edits` and `ref_length`.

    Raises:
        UserError: no hypotheses, unequal lengths, a line that is no string, an unknown metric.
    """
    for name in metrics:
        if name not in _METRICS:
            raise UserError(f"unknown metric {name!r}: choose from {', '.join(_METRICS)}")
    return {name: _corpus_score(name, hypotheses, references, target_lang) for name in metrics}


class _OfflineMetric(evaluate.Metric):
    """An `evaluate.Metric` over one entry of `_METRICS`, made directly and not through `evaluate.load`."""

    sacrebleu_name: str
    citation_url: str

    def _info(self) -> evaluate.MetricInfo:
        inputs = "predictions: list of strings. references: list of strings, or of lists of strings."
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=self.citation_url,
            inputs_description=inputs,
            features=[
                Features({"predictions": Value("string"), "references": List(Value("string"))}),
                Features({"predictions": Value("string"), "references": Value("string")}),
            ],
            reference_urls=[self.citation_url],
        )

    def add_batch(self, *, predictions: Sequence[str] | None = None, references: Sequence | None = None) -> None:
        """Add sentences for the next `compute()`; `UserError` if there are none or the lengths differ."""
        _checked_pair(predictions, references)
        super().add_batch(predictions=predictions, references=references)

    def _compute(self, predictions: list[str], references: list) -> dict:
        return _corpus_score(self.sacrebleu_name, predictions, references)


class Bleu(_OfflineMetric):
    """Corpus BLEU of sacreBLEU's defaults: 13a tokens, cased, smoothing exp (Papineni et al. 2002)."""

    sacrebleu_name = "bleu"
    citation_url = "https://aclanthology.org/P02-1040"


class Chrf(_OfflineMetric):
    """chrF2: F-score of character 1- to 6-grams, recall counting twice (Popović 2015)."""

    sacrebleu_name = "chrf"
    citation_url = "https://aclanthology.org/W15-3049"


class Ter(_OfflineMetric):
    """TER: edits and shifts per hundred reference words; lower is better (Snover et al. 2006)."""

    sacrebleu_name = "ter"
    citation_url = "https://aclanthology.org/2006.amta-papers.25"


def _sacremoses():
    try:
        import sacremoses
    except ImportError:
        raise UserError('P1 on raw text needs sacremoses: pip install "hf-vanilla-transformer[moses]"') from None
    return sacremoses


def p1_tokens(lines: Iterable[str], language: str) -> list[str]:
    """Turn raw text into the form of Multi30k's `task1/tok` (`lc.norm.tok`).

    Lower-case, then Moses punctuation normalisation, then Moses tokenisation with escapes (`&apos;`) and
    unsplit hyphens: the order of upstream's `scripts/task1-tokenize.sh`.

    Args:
        lines: raw sentences.
        language: `cs`, `de`, `en` or `fr`; quotes, apostrophes and abbreviations depend on it.

    Returns:
        One string of tokens separated by spaces per line.

    Raises:
        UserError: another language, no lines, or sacremoses is not installed.
    """
    if language not in P1_LANGUAGES:
        raise UserError(
            f"P1 on raw text needs the language of the hypotheses: got {language!r}, "
            f"choose from {', '.join(P1_LANGUAGES)}"
        )
    moses = _sacremoses()
    normalizer = moses.MosesPunctNormalizer(language, perl_parity=True)
    tokenizer = moses.MosesTokenizer(language)
    # The Perl scripts see a line with its newline; their rule that turns a final `."` into `".` needs it.
    return [
        tokenizer.tokenize(normalizer.normalize(line.lower() + "\n"), return_str=True)
        for line in _checked_lines(lines, "hypotheses")
    ]


def p1_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    raw: bool,
    language: str | None = None,
) -> dict:
    """BLEU by protocol P1 of Multi30k: equals `multi-bleu.perl -lc` on Moses tokens, no smoothing.

    Args:
        hypotheses: translations, raw text or tokens (see `raw`).
        references: lines of `task1/tok/*.lc.norm.tok.*`, lower-cased and tokenised already.
        raw: True = the hypotheses are raw text and go through `p1_tokens`; False = they are tokens already.
        language: language of the hypotheses; needed when `raw`, not looked at otherwise.

    Returns:
        As `score` does for BLEU; the signature names P1 and the tokenizer.

    Raises:
        UserError: as `score` and `p1_tokens`; references with capitals (raw lines instead of `task1/tok`).
    """
    if not raw:
        return _corpus_score("p1", hypotheses, references)
    result = _corpus_score("p1", p1_tokens(hypotheses, language), references)
    tokenizer = f"tok:lc.norm.tok-{language}-sacremoses-{_sacremoses().__version__}"
    return {**result, "signature": result["signature"].replace("tok:none", tokenizer)}


@dataclass(frozen=True)
class PairedBootstrap:
    """Is system B better than system A? All scores are points of `metric`.

    Attributes:
        metric: `"bleu"`, `"chrf"` or `"p1"`.
        score_a: score of A on the whole corpus.
        score_b: score of B.
        difference: `score_b - score_a`.
        low: lower end of the 95% interval of the difference.
        high: upper end.
        p_value: two-sided; how often resampling alone moves the difference this far from its mean.
        samples: number of resampled corpora.
        seed: of the resampling.
        signature: sacreBLEU's, with `bs` and `seed` added.
    """

    metric: str
    score_a: float
    score_b: float
    difference: float
    low: float
    high: float
    p_value: float
    samples: int
    seed: int
    signature: str

    def in_words(self, a: str = "A", b: str = "B") -> str:
        """The verdict as one sentence, with `a` and `b` as the names of the systems."""
        low, high = self.low, self.high
        if self.difference < 0:
            a, b, low, high = b, a, -high, -low
        p = f"p = {self.p_value:.3f}" if self.p_value >= 0.001 else "p < 0.001"
        gain = f"{abs(self.difference):.2f} {_LABELS[self.metric]}"
        evidence = f"(95% {low:.2f}…{high:.2f}, {p})"
        if self.p_value < 0.05:
            return f"{b} is better than {a} by {gain} {evidence}"
        return f"{b} is not shown to be better than {a}: difference {gain} {evidence}"


def _resampled_differences(
    points: Callable[[np.ndarray], float], stats_a: np.ndarray, stats_b: np.ndarray, samples: int, seed: int
) -> np.ndarray:
    generator = np.random.default_rng(seed)
    differences = np.empty(samples)
    for sample in range(samples):
        drawn = generator.integers(len(stats_a), size=len(stats_a))
        differences[sample] = points(stats_b[drawn]) - points(stats_a[drawn])
    return differences


def paired_bootstrap(
    hypotheses_a: Sequence[str],
    hypotheses_b: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    metric: str = "bleu",
    samples: int = 1000,
    seed: int = 12345,
    target_lang: str | None = None,
) -> PairedBootstrap:
    """Compare two systems on the same sentences by paired bootstrap resampling (Koehn 2004).

    Each resampled corpus draws sentences with replacement, the same ones for A and B. The p-value is
    two-sided: the resampled differences are centred (Efron and Tibshirani 1993, section 16.4), so it agrees
    with the interval. `sacrebleu --paired-bs` centres absolute differences instead, which gives about half of
    it when A and B are far apart. Several test sets are pooled by concatenating them.

    Args:
        hypotheses_a: translations of system A, one string per sentence.
        hypotheses_b: translations of system B.
        references: one string or one list of strings per sentence.
        metric: `"bleu"` or `"chrf"` on raw text, `"p1"` on tokens (see `p1_tokens`).
        samples: number of resampled corpora.
        seed: decides the draws alone; no environment variable is read.
        target_lang: as in `score`.

    Raises:
        UserError: as `score`, and for fewer than one sample.
    """
    if metric not in _LABELS:
        raise UserError(f"cannot compare systems by {metric!r}: choose from {', '.join(_LABELS)}")
    if samples < 1:
        raise UserError(f"samples is {samples}: the bootstrap needs at least 1, usually 1000")
    lines_a, per_sentence = _checked_pair(hypotheses_a, references, "hypotheses of A")
    lines_b, _ = _checked_pair(hypotheses_b, per_sentence, "hypotheses of B")
    scorer = _scorer(metric, per_sentence, target_lang)

    def statistics(lines: list[str]) -> np.ndarray:
        return np.array(scorer._extract_corpus_statistics(lines, _streams(per_sentence)), dtype=np.float64)

    # Statistics add up over sentences, so a resampled corpus is scored without reading its text again.
    def points(stats: np.ndarray) -> float:
        return float(scorer._compute_score_from_stats(stats.sum(axis=0)).score)

    stats_a, stats_b = statistics(lines_a), statistics(lines_b)
    score_a, score_b = points(stats_a), points(stats_b)
    differences = _resampled_differences(points, stats_a, stats_b, samples, seed)
    as_far = np.count_nonzero(np.abs(differences - differences.mean()) >= abs(score_b - score_a))
    low, high = np.percentile(differences, [2.5, 97.5])
    return PairedBootstrap(
        metric=metric,
        score_a=score_a,
        score_b=score_b,
        difference=score_b - score_a,
        low=float(low),
        high=float(high),
        p_value=(as_far + 1) / (samples + 1),
        samples=samples,
        seed=seed,
        signature=_signature(metric, scorer, bs=samples, seed=seed),
    )
