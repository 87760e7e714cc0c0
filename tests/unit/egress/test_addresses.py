"""One spelling of each address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.errors import RequestError
from cache_server.egress.addresses import (
    Address,
    check_bucket,
    check_name,
    parse_address,
    parse_host,
    parse_source,
)

GOOD = {
    "http://store.example": Address("http", "store.example"),
    "https://Store.Example:9000/a/b": Address("https", "store.example", 9000, "/a/b"),
    "HTTP://minio.team.svc:9000/": Address("http", "minio.team.svc", 9000, "/"),
    "http://10.0.0.7:80": Address("http", "10.0.0.7", 80),
    "http://[FD00:0:0::1]:80/x": Address("http", "fd00::1", 80, "/x"),
    "https://h/a%20b/arn:aws:glue": Address("https", "h", None, "/a%20b/arn:aws:glue"),
}
# Each of them some library takes for the loopback address, or for another host than it shows.
LOOPBACK = "127.0.0.1:80"
BAD = [
    LOOPBACK, "//" + LOOPBACK, "http:" + LOOPBACK, "http:/" + LOOPBACK, "http:///" + LOOPBACK,
    "http:\\\\" + LOOPBACK, "http://\\" + LOOPBACK, f"http://{LOOPBACK}\\@example.com",
    f"http://example.com@{LOOPBACK}", f"http://u:p@{LOOPBACK}", "http://2130706433", "http://127.1",
    "http://0x7f000001", "http://0x7f.0.0.1", "http://0177.0.0.1", "http://127.0.0.1.",
    "http://127.0.0.001", "http://[::1%25lo]", "http://[::1%lo]", "http://[127.0.0.1]", "http://::1",
    "http://[::1", "http://[::1]x", "http://%31%32%37.0.0.1", "http://127.0.0.1%00.example.com",
    "http://\u2460\u2461\u2466.0.0.1", "http://\uff11\uff12\uff17.0.0.1", "http://ex\u00e4mple.com",
    "http://example.com:80:80", "http://example.com:", "http://example.com:0", "http://h:65536",
    "http://h:080", "http://h:+80", "http://h: 80", "http:// h", " http://h", "http://h ",
    "http://h\t", "ht\ntp://h", "http://h\r\nX: y", "http://h/a b", "http://h/?a", "http://h?a",
    "http://h#a", "http://h/#a", "http://h/../a", "http://h/%2e%2e/a", "http://h/%252e%252e/a",
    "http://h/..%5ca", "http://h/%zz", "http://h/a\\b", "http://", "http:///x", "http://@h",
    "http://.h", "http://h..x", "http://-h", "http://h-", "http://" + "a" * 64,
    "http://" + ".".join(["a" * 60] * 5), "ftp://h", "javascript://h", "", "http", "http:h",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_an_address_is_rebuilt_from_its_parts(text: str) -> None:
    address = parse_address("it", text)
    assert address == GOOD[text]
    assert parse_address("it", str(address)) == address


@pytest.mark.parametrize("text", BAD)
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the option 'endpoint' is not right"):
        parse_address("the option 'endpoint'", text)


@given(st.text(alphabet="ht:p/\\@.%1207x[]f#? ab\n"))
def test_each_text_is_refused_or_keeps_its_meaning(text: str) -> None:
    try:
        address = parse_address("it", f"http://{text}")
    except RequestError:
        return
    assert str(address).lower().removesuffix("/") == f"http://{text}".lower().removesuffix("/")


def test_a_user_is_accepted_only_where_it_may_be() -> None:
    address = parse_address("it", "https://some%40one@h/x", may_have_user=True)
    assert (address.user, str(address)) == ("some%40one", "https://some%40one@h/x")
    with pytest.raises(RequestError, match="no user name") as raised:
        parse_address("it", "https://user:secret@h", may_have_user=True)
    assert "secret" not in str(raised.value)


def test_a_password_is_accepted_only_of_an_operator_and_never_kept_or_shown() -> None:
    address = parse_address("it", "http://user:hush%2Fhush@H:9000", may_have_password=True)
    assert str(address) == "http://user@h:9000"
    for bad in ("http://u:hush/hush@h", "u:hush@h", "http://u:hu:sh@h", "http://:hush@h"):
        with pytest.raises(RequestError) as raised:
            parse_address("it", bad, may_have_password=True)
        assert "hu" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "authority", "key"),
    [("s3://bucket/a b?.csv", "bucket", "a b?.csv"), ("S3A://My_Bucket.x", "My_Bucket.x", ""),
     ("gs://b/x#y", "b", "x#y"), ("az://$web/x", "$web", "x"),
     ("abfss://c@Account.dfs.core.windows.net/x", "c@account.dfs.core.windows.net", "x"),
     ("abfs://c@account/x", "c@account", "x"), ("http://u@Host:80/a%20b", "u@host:80", "a%20b"),
     ("s3://arn:aws:s3:eu-west-1:1:accesspoint:x/y", "arn:aws:s3:eu-west-1:1:accesspoint:x", "y")],
)  # fmt: skip
def test_a_source_has_a_bucket_or_a_host_and_a_key(uri: str, authority: str, key: str) -> None:
    source = parse_source(uri)
    assert (source.authority, source.key) == (authority, key)


@pytest.mark.parametrize(
    "uri",
    [f"s3://{LOOPBACK}?/a.csv", f"s3://{LOOPBACK}/a.csv", f"s3://x@{LOOPBACK}/a.csv", "s3://a%2fb/x",
     f"s3://x@{LOOPBACK}%2f/a.csv", f"s3://{LOOPBACK}\\/a.csv", "s3://a#/x", "s3:///x", "s3://a..b/x",
     f"gs://{LOOPBACK}/x", f"abfss://c@{LOOPBACK}/x", "abfss://c@127.0.0.1/x", "abfss://c@[::1]/x",
     "abfss://c@account:443/x", "abfss://c@h\n/@x@y", "abfss://c@a@b/x", "az://c@/x", "az://a?b/x",
     "http://h/x?y", "http://h\\@x/y", "http:///x", "ftp://h/x", "s3:/b/x", "s3:b", "/etc/passwd",
     "http://u:p@h/x", "s3://b\n/xy", "http://2130706433/x"],
)  # fmt: skip
def test_a_source_with_another_spelling_is_refused(uri: str) -> None:
    with pytest.raises(RequestError, match="source"):
        parse_source(uri)


def test_a_name_that_becomes_part_of_a_host_is_plain() -> None:
    for good in ("us-east-1", "auto", "account1", "11111111-2222-3333-4444-555555555555", "a.b"):
        check_name("the option 'region'", good)
    for bad in ("", f"x@{LOOPBACK}/?", "a/b", "a..b", "a?", "a#", "a b", "a\\", ".a", "a.", "a\n"):
        with pytest.raises(RequestError, match="the option 'region' is not right"):
            check_name("the option 'region'", bad)
    with pytest.raises(RequestError, match="cannot be the name of a bucket"):
        check_bucket("the source", "127.0.0.1:80?")


def test_a_host_alone_is_read_the_same_way() -> None:
    assert parse_host("it", "DB.example") == "db.example"
    for bad in ("/var/run", "@abstract", "a,b", "a:1", "127.1", "", "::1"):
        with pytest.raises(RequestError):
            parse_host("it", bad)
