"""Secrets of a configuration are replaced by references to environment variables."""

from __future__ import annotations

from areno.config.secrets import without_secrets


def test_secrets_in_lists_are_replaced_and_other_lists_are_kept():
    hidden = without_secrets(
        {"password": ("a", "b"), "stop": ["a"], "servers": [{"access_key": "c", "url": "http://h"}]}
    )
    assert hidden == {
        "password": ["${oc.env:PASSWORD}"] * 2,
        "stop": ["a"],
        "servers": [{"access_key": "${oc.env:ACCESS_KEY}", "url": "http://h"}],
    }
