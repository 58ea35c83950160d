import pytest

from services.chassis.settings import SettingsError
from services.worker.settings import parse_size, read_settings


def test_defaults():
    settings = read_settings(["--model", "tiny"], {})
    assert settings.scheduler == "127.0.0.1:50052"
    assert (settings.dtype, settings.device, settings.block_size) == ("auto", "auto", 16)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (128, None)
    assert (settings.listen, settings.kv_cache_bytes, settings.worker_id) == ((), None, None)


def test_flags_beat_the_environment():
    env = {"QUIRE_MODEL": "a", "QUIRE_KV_CACHE_MEMORY": "1GiB", "QUIRE_MAX_NUM_SEQS": "4"}
    settings = read_settings(["--kv-cache-memory", "2MiB", "--listen", "a:1,unix:///b"], env)
    assert (settings.model, settings.kv_cache_bytes, settings.max_num_seqs) == ("a", 2**21, 4)
    assert settings.listen == ("a:1", "unix:///b")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("4gib", 4 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("10KiB", 10240),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4 X", "-1", "1e9", "4GiBs", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--model is required"),
        (["--dtype", "int8"], "--dtype must be one of auto, float32, bfloat16, float16, got int8"),
        (["--device", "tpu"], "--device must be one of auto, cpu, cuda, got tpu"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory must be bytes or a size"),
        (["--kv-cache-memory", "4 apples"], "--kv-cache-memory must be bytes or a size"),
        (["--block-size", "0"], "--block-size must be in 1..4096, got 0"),
        (["--max-num-seqs", "many"], "--max-num-seqs:? must be a whole number, got .many."),
        (["--gpu-memory-utilization", "1.5"], r"--gpu-memory-utilization must be in \(0, 1\]"),
        (["--worker-id", "w" * 129], "--worker-id must be 1 to 128 characters"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size .* is not available in this"),
        (["--trust-remote-code"], "--trust-remote-code .* is not available in this version"),
        (["--max-len", "7"], "unknown flag --max-len"),
    ],
)
def test_problems_are_named(argv, says):
    with pytest.raises(SettingsError, match=says):
        read_settings(argv, {})
