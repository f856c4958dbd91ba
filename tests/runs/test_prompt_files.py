"""Prompt files: the formats, and one error line for each way a file can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.prompt_files import (
    check_unique,
    load_prompts,
    prompts_digest,
    prompts_from_texts,
)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt_skips_comments_and_blank_lines_and_numbers_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\ufeff# comment\r\n\r\n  a red apple \r\nkey\n")
    found = [(p.id, p.text) for p in load_prompts(path)]
    assert found == [("00001", "a red apple"), ("00002", "key")]


def test_control_characters_are_data(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'prompt\n"a\nb"\n')
    assert [p.text for p in load_prompts(path)] == ["a\nb"]
    path = write(tmp_path, "a.txt", "a\x1b[31m\x0b\x1cb\u2028c\n")
    assert [p.text for p in load_prompts(path)] == ["a\x1b[31m\x0b\x1cb\u2028c"]


@pytest.mark.parametrize(
    ("column", "ending", "mark"), [("Prompt", ".csv", ","), ("caption", ".tsv", "\t")]
)
def test_tables_keep_extra_columns(tmp_path: Path, column: str, ending: str, mark: str) -> None:
    head = mark.join(["id", column, "Category", "seed", "negative_prompt"])
    body = mark.join(["x", f'"a ""big""{mark}\nkey"', "Arts", "7", ""])
    (prompt,) = load_prompts(write(tmp_path, "a" + ending, f"{head}\n{body}\n\n"))
    assert prompt.text == f'a "big"{mark}\nkey'
    assert (prompt.id, prompt.seed, prompt.negative_prompt) == ("x", 7, None)
    assert prompt.extra == {"Category": "Arts"}


# The file's name | what it holds, with escapes; bytes are Latin-1 | what the error says of it.
BAD = r"""
a.jsonl | key | expected a prompt file ending in .txt, .csv, .tsv (or 'demo'), got .jsonl
a.txt | | a.txt: expected at least one prompt
a.txt | # key | expected at least one prompt
a.csv | prompt\n | expected at least one prompt
a.txt | key\nna\xefve\n | a.txt:2: expected UTF-8, got the byte 0xef
a.txt | k\0e\0y\0 | a.txt:1: expected UTF-8, got the byte 0x00
a.csv | prompt\na\0b\n | a.csv:2: expected UTF-8, got the byte 0x00
a.txt | \xff\xfek\0e\0y\0 | a.txt:1: expected UTF-8, got the byte 0xff
a.csv | text,id\nkey,1\n | a.csv:1: expected a column named prompt or caption, got text, id
a.csv | prompt,Width\nkey,64\n | a.csv:1: expected no column Width, because all images of a run have
a.csv | prompt,x,x\nkey,1,2\n | a.csv:1: expected different column names, got 'x' twice
a.csv | prompt,x\nkey,1\nkey\n | a.csv:3: expected 2 columns as in the header, got 1
a.csv | prompt\n"key\n | a.csv:2: expected a table, but unexpected end of data
a.csv | prompt,x\n,1\n | a.csv:2: expected a prompt, got an empty one
a.csv | prompt,seed\nkey,1.5\n | a.csv:2: seed: expected a whole number from 0 to
a.csv | prompt,seed\nkey,-1\n | a.csv:2: seed: expected a whole number from 0 to 2^63 - 1, got '-1'
a.csv | prompt,id\nkey,00002\nant,\n | a.csv:3: expected unique ids
a.csv | prompt,id\nkey,a\nant,b\nbat,A\n | a.csv:4: expected unique ids (ignoring case)
"""


@pytest.mark.parametrize("case", BAD.strip().splitlines())
def test_bad_files_name_file_and_line(tmp_path: Path, case: str) -> None:
    name, content, message = (part.strip() for part in case.split("|"))
    data = content.encode().decode("unicode_escape").encode("latin-1")
    with pytest.raises(UserError) as caught:
        load_prompts(write(tmp_path, name, data))
    assert message in str(caught.value)


def test_what_never_ends_or_would_take_hours_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'prompt\n"' + "key " * 40_000 + '"\n')
    with pytest.raises(UserError, match=r"field larger than field limit .* check its quotes"):
        load_prompts(path)
    long = write(tmp_path, "long.txt", "a " * 5_000_000)
    with pytest.raises(UserError, match="at most 100,000 characters, got 9,999,999; shorten it"):
        load_prompts(long)
    with pytest.raises(UserError, match=r"at most 1,000,000, got 9,999,999,999; lower it"):
        GenerateSettings(images_per_prompt=9_999_999_999)
    with pytest.raises(UserError, match="at most 1,000,000 images of a run, got 1,200,000"):
        jobs_of(prompts_from_texts(["a", "b"]), GenerateSettings(images_per_prompt=600_000))


@pytest.mark.parametrize(
    "bad", ["../x", "a/b", "a\\b", "..", ".x", " a", "a\x1b", "a\nb", "c:x", "x" * 201]
)
def test_ids_stay_in_the_folder(tmp_path: Path, bad: str) -> None:
    with pytest.raises(UserError, match=r"a\.csv:2: id: expected"):
        load_prompts(write(tmp_path, "a.csv", f'prompt,id\nkey,"{bad}"\n'))


def test_prompts_of_the_command_line_do_not_collide_with_a_files() -> None:
    prompts = prompts_from_texts(["a", "b"])
    assert [p.id for p in prompts] == ["p00001", "p00002"]
    for bad, message in (("", "got an empty one"), ("\ud800", "half of a surrogate pair")):
        with pytest.raises(UserError, match=message):
            prompts_from_texts([bad])
    with pytest.raises(UserError, match="expected unique ids"):
        check_unique([*prompts, prompts[0]])
    one, same, other = (prompts_digest(prompts_from_texts([text])) for text in "aab")
    assert one.startswith("97673c9dae21"), "as earlier run folders have it"
    assert one == same != other


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["txt", "csv", "tsv"]), st.binary() | st.text().map(str.encode))
def test_any_bytes_are_prompts_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, ending: str, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{ending}"
    path.write_bytes(data)
    message, prompts = str(path), None
    try:
        prompts = load_prompts(path)
    except UserError as error:
        message = str(error)
    assert message.startswith(str(path))
    if prompts is not None:
        assert prompts
        names = [f"{prompt.id}_0.png" for prompt in prompts]
        assert [Path(name).name for name in names] == names
        assert len({name.casefold() for name in names}) == len(names)
        prompts_digest(prompts)
