"""mame_sd.upstream: every name is there, and one that is gone is named in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from mame_sd import upstream


@pytest.fixture
def _fresh() -> object:
    upstream.missing.cache_clear()
    yield
    upstream.missing.cache_clear()


def test_the_installed_release_has_every_name() -> None:
    assert upstream.missing() == ()
    upstream.require()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("gone", [lambda: False, lambda: upstream._of("cache_utils:NoSuchLayer")])
def test_a_name_that_is_gone_is_told(gone: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.NAMES, "a name of no release", gone)
    with pytest.raises(RuntimeError, match=r"transformers 5\.\d+.*expected a name of no release"):
        upstream.require()


@pytest.mark.parametrize("name", upstream.CACHE_NAMES)
def test_the_cache_is_found_by_both_names(name: str) -> None:
    class Attention(nn.Module):
        def old(self, hidden_states: object, past_key_values: object = None) -> None: ...

        def new(self, hidden_states: object, cache: object = None) -> None: ...

    assert upstream.cache_in({name: 3, "use_cache": True}) == 3
    assert upstream.cache_in({name: None}) is None
    assert upstream.cache_of(SimpleNamespace(**{name: 3})) == 3
    assert upstream.cache_argument(Attention.new) == "cache"
    assert upstream.cache_argument(Attention.old) == "past_key_values"
    assert upstream.cache_argument(nn.Linear.forward) is None
