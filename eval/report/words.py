"""What the report says in words that depend on what was measured: images that were made, or answers
that were given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..results.schema import Results

# families of the rows that the headline's is compared with
PUBLISHED = {"tomesd": "ToMeSD", "tome": "ToMe"}


@dataclass(frozen=True)
class Words:
    """Sentences of one kind of benchmark.

    Attributes:
        frontier: under the plot of speed against closeness.
        fidelity: what fidelity compares.
        quality: what quality says.
        test: by which the p-values are.
        beside: what lies beside the page.
        action: what the method does.
    """

    frontier: str
    fidelity: str
    quality: str
    test: str
    beside: str
    action: str


WORDS = {
    "generation": Words(
        frontier="Further right is faster, further down is closer to the baseline's images.",
        fidelity=(
            "Each merged image is compared with the baseline's image of the same prompt, seed and"
            " noise. Fidelity says how little merging changes, not how good an image is."
        ),
        quality="How good the images are by themselves",
        test="paired sign-flip test",
        beside="with every number of every image",
        action="merges redundant tokens before self-attention, restores them after it",
    ),
    "classification": Words(
        frontier="Further right is faster, further down is closer to the unmerged model's answers.",
        fidelity=(
            "Each answer is compared with the unmerged model's for the same image. Fidelity says"
            " how little merging changes, not how often an answer is right."
        ),
        quality="How often the answers are right",
        test="McNemar's exact test",
        beside="with every figure, <code>answers/</code> with the answer to every image",
        action="merges redundant tokens between attention and MLP",
    ),
}


def words_of(results: Results) -> Words:
    """The words of the benchmark's kind."""
    return WORDS[results.kind]
