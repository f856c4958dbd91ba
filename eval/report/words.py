"""What the report says in words that depend on what was measured: images that were made, or answers
that were given.
"""

from __future__ import annotations

# families of the rows that the headline's is compared with
PUBLISHED = {"tomesd": "ToMeSD", "tome": "ToMe"}
# Sentences by kind of benchmark: under the plot of speed against closeness, what fidelity compares,
# what quality says, by which test the p-values are, what lies beside the page, what the method does
WORDS: dict[str, dict[str, str]] = {
    "generation": {
        "frontier": "Further right is faster, further down is closer to the baseline's images.",
        "fidelity": (
            "Each merged image is compared with the baseline's image of the same prompt, seed and"
            " noise. Fidelity says how little merging changes, not how good an image is."
        ),
        "quality": "How good the images are by themselves",
        "test": "paired sign-flip test",
        "beside": "with every number of every image",
        "action": "merges redundant tokens before self-attention, restores them after it",
    },
    "classification": {
        "frontier": (
            "Further right is faster, further down is closer to the unmerged model's answers."
        ),
        "fidelity": (
            "Each answer is compared with the unmerged model's for the same image. Fidelity says"
            " how little merging changes, not how often an answer is right."
        ),
        "quality": "How often the answers are right",
        "test": "McNemar's exact test",
        "beside": "with every figure, <code>answers/</code> with the answer to every image",
        "action": "merges redundant tokens between attention and MLP",
    },
}
