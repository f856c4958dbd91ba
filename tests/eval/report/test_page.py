"""The page: nothing in it is fetched or executed, everything has words, colours and ids hold."""

from __future__ import annotations

from pathlib import Path

from mame_sd.eval.report import render
from mame_sd.eval.report.select import cases, focus
from tests.builders.report_example import Elements, Results, example, parsed, row


def test_nothing_is_fetched_ids_are_unique_and_everything_has_words(page: str) -> None:
    elements = Elements(page)
    given = [(name, value) for _, attrs in elements.tags for name, value in attrs.items() if value]
    addresses = [value for name, value in given if name in ("src", "href")]
    assert [a for a in addresses if not a.startswith(("data:", "#"))] == []
    (policy,) = (
        a["content"] or ""
        for a in elements.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data:;")
    ids = [value for name, value in given if name == "id"]
    assert len(ids) == len(set(ids))
    assert page.count('class="shot"') == 3 * 5, "three cases with two maps each"
    # the last is the dialog's, filled by the script
    assert all(image["alt"] for image in elements.all("img")[:-1])
    assert "MaMe (default) 1.60 times as fast" in (elements.all("svg")[0]["aria-label"] or "")


ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</p></style><style>*{background:url(//x.test)}</style>",
    "{{ 7 * 7 }}{% for x in y %}{# #}",
    "\u202edrowssap\u2066 \u200f",
    "a\u2028b\0\x1b[31m\x85",
    "$\\input{/etc/passwd}$ \\write18{id} | a | b | `c` [d](//x.test) ![e](//x.test)",
)


def shape(folder: Path, words: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Tags and names of attributes of a report in which `words` are all that others may write."""
    every = " ".join(words)
    results = example(folder, side=4, prompts=words)
    results["notes"] = list(words)
    results["suite"] = results["reference"] = results["manifest"]["model"]["name"] = every
    results["manifest"]["command"] = f"mame-sd-eval benchmark --prompts '{every}'"
    results["gates"] += [
        {"name": word, "expected": word, "got": word, "passed": False} for word in words
    ]
    for entry in results["rows"]:
        entry["reason"] = every
    page = render(parsed(results), folder).read_text(encoding="utf-8")
    return [(tag, sorted(attributes)) for tag, attributes in Elements(page).tags]


def test_no_text_makes_elements(tmp_path: Path) -> None:
    harmless = ("a harmless word",) * len(ATTACKS)
    assert shape(tmp_path / "attacks", ATTACKS) == shape(tmp_path / "harmless", harmless)


def test_failed_gates_come_first_and_a_benchmark_that_has_just_begun_has_a_report(
    tmp_path: Path, unplotted: Results
) -> None:
    results, name = unplotted, "unrelated <pairing>"
    results["gates"].append({"name": name, "expected": "far", "got": "near", "passed": False})
    results["sensitivity"] = "Can it? NO with so few prompts. far has an LPIPS of 0."
    text = render(parsed(results), tmp_path).read_text(encoding="utf-8")
    unable = "so distances in this report rank no method. far has an LPIPS of 0."
    assert text.index(unable) < text.index('id="pictures"')
    assert text.count("far has an LPIPS of 0.") == 2, "at the top, and next to the distances"
    assert "<strong>1 of 2 sanity gates failed:</strong> unrelated &lt;pairing&gt;" in text
    assert text.index("sanity gates failed") < text.index('id="pictures"')
    for entry in results["rows"]:
        entry.update(measured=False, reason=None, values={}, per_image={})
    results.update(gates=[], reference=None)
    text = render(parsed(results), tmp_path).read_text(encoding="utf-8")
    assert "No run with MaMe has been measured yet." in text
    assert "None were run" in text
    assert "Quality (no reference set was given)" in text


def test_cases_are_the_closest_the_median_and_the_furthest(results: Results) -> None:
    def picked() -> list[tuple[str, str]]:
        found = parsed(results)
        return cases(found, focus(found))

    scores = row(results, "mame-default")["per_image"]["lpips"]
    ranked = sorted(scores, key=scores.__getitem__)
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    for entry in results["rows"]:
        entry["values"].pop("lpips", None)  # PSNR takes its place, where higher is closer
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    known = {picture["key"]: picture for picture in results["pictures"]}
    for count, names in ((2, ["best", "worst"]), (1, ["only"])):
        results["pictures"] = [known[key] for key in ranked[:count]]
        assert picked() == list(zip(names, ranked[:count], strict=True))
    row(results, "mame-default")["per_image"] = {}
    assert picked() == [("", ranked[0])]


def test_missing_and_broken_images_are_named_and_the_rest_is_shown(
    tmp_path: Path, unplotted: Results
) -> None:
    files = [
        tmp_path / f"runs/{name}.png"
        for name in ("mame-default/images/00001_0", *(f"baseline/images/0000{n}_0" for n in (3, 4)))
    ]
    files[0].unlink()
    files[1].write_bytes(b"\x89PNG\r\n")
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[: len(whole) // 2])
    text = render(parsed(unplotted), tmp_path).read_text(encoding="utf-8")
    assert all(file.relative_to(tmp_path).as_posix() in text for file in files)
    assert text.count('class="shot"') == 3 + 2 + 2
