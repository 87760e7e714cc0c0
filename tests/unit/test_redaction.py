import pytest

from cache_server.redaction import hidden, redacted, secret_values

PEM = "-----BEGIN-----\nabc/+=\n-----END-----"


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("p@ss", "password p@ss is wrong"),
        ("p@ss", "cannot connect to postgresql://u:p%40ss@db"),
        ("a/b+c d", "https://host/a%2Fb%2Bc%20d"),
        ("a/b+c d", "https://host/a%2fb%2bc%20d"),
        ("a/b+c d", "https://host/a/b%2Bc%20d"),
        ("a/b+c d", "https://host?x=a%2Fb%2Bc+d"),
        (PEM, f"key {PEM}"),
        (PEM, f"key {PEM!r}"),
        ("postgresql://u:p%40ss@db/shop", "password p@ss is wrong"),
        ("postgresql://u:p%40ss@db/shop", "password p%40ss is wrong"),
    ],
)
def test_a_secret_is_hidden_in_whatever_form_it_stands(secret: str, text: str) -> None:
    for shown in (hidden(text, {secret}), redacted(text, [secret])):
        assert "***" in shown or "?" in text
        for part in ("p@ss", "p%40ss", "b+c", "b%2", "abc"):
            assert part not in shown


def test_what_is_no_secret_stays() -> None:
    text = "cannot read s3://lake/a b.parquet at http://host:9000: 404 (NoSuchKey)"

    assert redacted(text, {"", "sesame"}) == text


def test_a_text_without_known_secrets_shows_no_key_password_or_query() -> None:
    text = "AKIAABCDEFGHIJKLMNOP\n at http://u:pass@host:80/a?sig=abc postgres://v:w@x@y"

    assert redacted(text, ()) == "*** at http://u:***@host:80/a postgres://v:***@y"


def test_the_secrets_of_the_environment_are_told_by_their_names() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_REGION": "eu-west-1", "SAS": "abc"}

    assert secret_values({"token": "long enough", "pin": "123"}, environ) == {
        "hush-hush",
        "long enough",
    }
