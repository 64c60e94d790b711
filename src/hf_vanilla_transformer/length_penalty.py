"""How beam search weighs a hypothesis by its length.

`average` is what transformers does: log-probability / length^length_penalty. `wu` is the length penalty of Wu et al.
2016 (equation 14), with which section 6.1 of "Attention Is All You Need" translates (alpha 0.6, 4 beams):
log-probability / ((5 + length) / 6)^length_penalty. Length counts generated tokens, the end of the sentence included;
a prefix that the caller gave is left out.
"""

LENGTH_PENALTY_TYPES = ("average", "wu")


class WuLengthPenalty(float):
    """alpha of equation 14, as the right-hand side of `length ** length_penalty`.

    transformers writes that expression wherever it ranks hypotheses or asks whether the search may stop. A number that
    answers it with equation 14 reaches all of these places, and no search loop has to be written again.
    """

    def __rpow__(self, length: int) -> float:
        """((5 + length) / 6)^alpha."""
        return ((5 + length) / 6) ** float(self)


def length_penalty_of_type(length_penalty: float | None, name: str | None) -> float | None:
    """The exponent in the form that beam search takes.

    Args:
        length_penalty: the exponent; None, as where there is one beam only, stays None.
        name: one of `LENGTH_PENALTY_TYPES`; None means "average".

    Raises:
        ValueError: an unknown name.
    """
    if name not in (None, *LENGTH_PENALTY_TYPES):
        raise ValueError(f"length_penalty_type={name!r} is not one of {', '.join(LENGTH_PENALTY_TYPES)}")
    if name != "wu" or length_penalty is None:
        return length_penalty
    return WuLengthPenalty(length_penalty)
