import pytest

from services.chassis.addresses import is_target, split_host_port


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50052", ("127.0.0.1", 50052)),
        ("scheduler:1", ("scheduler", 1)),
        ("[::1]:0", ("::1", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_host_and_port(address, parts):
    assert split_host_port(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "foo", ":50052", "a:", "a:x", "a:-1", "a:65536", "a:²", "::1:5", "[]:5", "a b:5"),
        *("http://a:5", "a,b:5", "unix:foo:5/x", "a\n:5", "a:5 ", "a:000000005"),
    ],
)
def test_what_is_no_address(address):
    assert split_host_port(address) is None
    assert not is_target(address)


def test_targets():
    assert is_target("127.0.0.1:50052")
    assert not is_target("127.0.0.1:0")
    assert is_target("unix:///run/q.sock")
    assert not is_target("unix://q.sock")
    assert not is_target("unix:///" + "a" * 107)
    assert is_target("unix:///" + "a" * 106)
