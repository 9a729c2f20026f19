"""What is hidden in texts that are shown, and what that costs."""

from __future__ import annotations

import pytest
from growth import assert_linear

from lmi_server.contract.texts.quoting import LONGEST_MESSAGE, one_line
from lmi_server.contract.texts.secrets import SECRETS, Secrets, mask_url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:secret@host/x", "s3://***@host/x"),
        ("at https://token@host and http://host", "at https://***@host and http://host"),
        ("mail me@host", "mail me@host"),
        ("http://x/?a=1&X-Amz-Signature=abc&b=2", "http://x/?a=1&X-Amz-Signature=***&b=2"),
        ("?hf_token_of_me=abc", "?hf_token_of_me=***"),
        ("?token=&api_key=b", "?token=&api_key=***"),
        ("?tokens", "?tokens"),
        ("?TOKEN=a'b", "?TOKEN=***'b"),
    ],
)
def test_urls_lose_what_is_secret(text: str, shown: str) -> None:
    assert mask_url(text) == shown


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "://",
        "a://",
        "://a",
        "?token",
        "?token=",
        "token",
        "?",
        "&a=b",
        "&a",
        "-",
        "?-",
        "@",
        "api_",
        "?a-",
        "=&",
        "'",
    ],
)
@pytest.mark.parametrize("around", ["{}://", "://{}", "?{}", "?token{}", "?token{}=", "?token={}", "?{}token"])
def test_the_search_for_secrets_in_urls_takes_linear_time(part: str, around: str) -> None:
    assert_linear(lambda text: mask_url(around.format(text)), part)


@pytest.mark.parametrize("part", ["a", "a&", "a=b&", "a=://", "%41", "token=", "_pass", "="])
def test_the_search_for_secrets_takes_linear_time(part: str) -> None:
    secrets = Secrets(("a" * 40, "://" * 20))
    assert_linear(secrets.mask_query, part)
    assert_linear(secrets.mask, f"{part}://")


def test_a_long_query_is_cut_between_parameters() -> None:
    query = "a=b&" * 10_000
    shown = SECRETS.mask_query(query)
    assert shown.endswith("a=b&...")
    assert len(shown) <= LONGEST_MESSAGE
    assert SECRETS.mask_query("a=b&token=c") == "a=b&token=***"


def test_a_secret_is_hidden_in_a_message_that_escapes_its_line_end() -> None:
    secret, secrets = "pass\nword", Secrets()
    secrets.add(secret)
    assert secrets.mask(f"{one_line(secret)} and {secret}") == "*** and ***"
