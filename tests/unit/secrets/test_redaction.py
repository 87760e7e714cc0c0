import base64
import http.client
import time
from urllib.parse import quote, quote_plus

import pytest

from cache_server.secrets.redaction import hidden, redacted, secret_values

PEM = "-----BEGIN-----\nabc/+=\n-----END-----"
ODD = "hu/sh+ é%2=\\\"'<&>fin"


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
        ("user:a/b+c", "client_id=user&client_secret=a%2Fb%2Bc"),
    ],
)
def test_a_secret_is_hidden_in_whatever_form_it_stands(secret: str, text: str) -> None:
    for shown in (hidden(text, {secret}), redacted(text, [secret])):
        assert "***" in shown or "?" in text
        for part in ("p@ss", "p%40ss", "b+c", "b%2", "abc"):
            assert part not in shown


@pytest.mark.parametrize(
    "text",
    [
        ODD,
        repr(ODD),
        repr(ODD.encode()),
        repr(f"{ODD}'")[:-2],
        repr(ODD.replace('"', "")),
        quote(ODD),
        quote(ODD, safe=""),
        quote_plus(ODD),
        quote(ODD, safe="!#$%&'()*+,/:;=?@[]~"),
        base64.b64encode(ODD.encode()).decode(),
        base64.b64encode(f"u:{ODD}".encode()).decode(),
        base64.urlsafe_b64encode(f"me:{ODD}".encode()).decode(),
        base64.urlsafe_b64encode(f"you:{ODD}.".encode()).decode(),
    ],
)
def test_a_secret_is_hidden_however_a_library_writes_its_characters(text: str) -> None:
    secrets = {ODD, ODD.replace('"', "")}

    shown = redacted(f"denied to {text} at http://host:80/a", secrets)

    assert shown.startswith("denied to ") and shown.endswith(" at http://host:80/a")
    assert set(shown.removeprefix("denied to ").partition(" at ")[0]) <= set("*b'\"\\")


@pytest.mark.parametrize("token", ["hush-hush\n", PEM, "hush'\"\r\n"])
def test_a_token_that_http_client_refuses_to_send_is_hidden(token: str) -> None:
    """As boto3 and pyiceberg pass it on, of a token that was copied with its line end."""
    connection = http.client.HTTPConnection("host")
    connection.putrequest("GET", "/")
    with pytest.raises(ValueError, match="Invalid header value") as caught:
        connection.putheader("Authorization", f"Bearer {token}")

    assert redacted(str(caught.value), {token}).strip("'\"") in (
        "Invalid header value b'Bearer ***",
        'Invalid header value b"Bearer ***',
    )


def test_an_unknown_authorization_is_hidden() -> None:
    text = "sent {'Authorization': 'Bearer eyJ0eXAi.x-y_z'}: Basic authentication, Bearer tokens"

    expected = "sent {'Authorization': 'Bearer ***'}: Basic authentication, Bearer tokens"
    assert redacted(text, ()) == expected


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


def test_a_long_answer_of_a_store_is_looked_through_at_once() -> None:
    """From every character of it on, as a careless pattern does, it would take minutes."""
    begun = time.process_time()
    hidden("Ab0/" * 25_000, {"s3cr3t-CANARY", "x" * 400})
    assert time.process_time() - begun < 5.0
