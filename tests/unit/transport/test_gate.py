"""Where a token comes from, and that it does not go where others can read it."""

from pathlib import Path

import pytest

from rlplane.errors import ConfigError
from rlplane.transport.gate import TOKEN_VARIABLE, Gate, choose_token, with_token


@pytest.fixture(autouse=True)
def nothing_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_a_token_is_of_the_file_else_of_the_environment_else_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = choose_token(None)
    assert made is not None and len(made) >= 32 and made != choose_token(None)
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    assert choose_token(None) == "of the environment"
    (tmp_path / "token").write_text("  of the file\n")
    assert choose_token(tmp_path / "token") == "of the file"
    assert choose_token(None, none=True) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is blank"), (" \n", "is blank"), ("short", "at least 8"), ("first line\nsecond", "one line")],
)
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        choose_token(file)
    assert "second" not in str(caught.value)
    monkeypatch.setenv(TOKEN_VARIABLE, text)
    with pytest.raises(ConfigError, match=message):
        choose_token(None)


def test_a_file_that_is_not_there_is_an_error_and_no_new_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the token"):
        choose_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="exclude each other"):
        choose_token(tmp_path / "token", none=True)


def test_a_token_is_shown_in_an_address_from_which_it_can_be_read_again() -> None:
    token = "käse & brot/=?#"
    address = with_token("http://127.0.0.1:7457/", token)
    query = address.partition("?")[2]
    assert Gate(token).check("GET", "/", query, {"host": "127.0.0.1:7457"}) is None
    assert with_token("http://127.0.0.1:7457/", None) == "http://127.0.0.1:7457/"
