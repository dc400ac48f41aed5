"""Addresses of the command line beside those of the SLA file."""

from __future__ import annotations

import pytest

from policies.sla.config import Config
from policies.sla.parse import parse
from router.start.commands.overrides import listening


def a_config(**server: str) -> Config:
    return parse(f"server: {{{', '.join(f'{name}: {value!r}' for name, value in server.items())}}}\n")


def test_without_options_the_addresses_of_the_file_stay() -> None:
    config = a_config(http="127.0.0.1:1", grpc="127.0.0.1:2", admin="127.0.0.1:3", picker="127.0.0.1:4")
    assert listening(config, None, None, None) == config


def test_options_override_the_file() -> None:
    config = a_config(http="127.0.0.1:1", grpc="127.0.0.1:2", admin="127.0.0.1:3", picker="127.0.0.1:4")
    server = listening(config, "a:5", "a:6", "a:7", "a:8").server
    assert (server.http, server.grpc, server.admin, server.picker) == ("a:5", "a:6", "a:7", "a:8")


def test_a_port_can_be_off() -> None:
    server = listening(a_config(admin="127.0.0.1:3"), None, "off", "off").server
    assert (server.grpc, server.admin) == (None, None)


@pytest.mark.parametrize(
    ("in_file", "option", "is_usual", "expected"),
    [
        (None, None, False, None),
        ("127.0.0.1:3", None, True, "127.0.0.1:3"),
        (None, "127.0.0.1:7", True, "127.0.0.1:7"),
        (None, "off", True, None),
    ],
)
def test_the_admin_port_is_on_where_file_option_or_command_want_it(
    in_file: str | None, option: str | None, is_usual: bool, expected: str | None
) -> None:
    config = a_config() if in_file is None else a_config(admin=in_file)
    assert listening(config, None, None, option, usual_admin=is_usual).server.admin == expected


def test_up_serves_the_admin_port_on_this_machine_though_no_file_names_it() -> None:
    admin = listening(a_config(), None, None, None, usual_admin=True).server.admin
    assert admin is not None
    assert admin.startswith("127.0.0.1:")
