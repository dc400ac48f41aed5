import os
from pathlib import Path

import pytest

from policies.errors import ConfigError
from router.regular_file import MOST_BYTES
from router.start.config_file import ConfigFile


def test_a_file_is_read_with_what_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    path = tmp_path / "sla.yaml"
    path.write_text(f"tenants: {{a: {{keys: ['${{env:KEY}}', '${{file:{tmp_path}/key}}']}}}}")
    contents = ConfigFile(path, {"KEY": "other"}).read()
    assert len(contents.config.tenants["a"].key_hashes) == 2
    assert contents.stamp == contents.source.stamp()


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    path.write_text("clases: {}")
    with pytest.raises(ConfigError, match=r"sla.yaml:1: clases: there is no 'clases' here \(did you mean 'classes'"):
        ConfigFile(path, {}).read()


@pytest.mark.parametrize(
    ("pool", "option", "sentence"),
    [
        ("local: 1", "dtype: int7", r"must be auto, float32, bfloat16, float16 or int8, not 'int7'"),
        ("local: 1", "threads: 0", r"must be a whole number of at least 1, not '0'"),
        ("local: 1", "pin-share: 2", r"must be a number of at least 0 and at most 0.99, not '2'"),
        ("local: 1", "deterministic: perhaps", r"must be true or false, not 'perhaps'"),
        ("local: 1", "device: [cpu, cuda]", r"must be auto, cpu or cuda, not 'cpu, cuda'"),
        ("local: 1", "kv_memory: 2", r"there is no option 'kv_memory' \(did you mean 'kv-memory'\?\)"),
        ("local: 1", "socket: 'a:1'", r"there is no option 'socket' \(known: answer_s, .*kv-memory.*threads.*\)"),
        ("at: ['a:1']", "dtype: int8", r"there is no option 'dtype' \(known: answer_s, attach_s,"),
        ("at: ['a:1']", "attach_s: soon", r"option 'attach_s' must be a number, not 'soon'"),
        ("kind: vllm, at: ['http://a:1']", "prioritty: true", r"\(did you mean 'priority'\?\)"),
        ("kind: vllm, at: ['http://a:1']", "key: x", r"there is no option 'key'"),
        ("kind: vllm, at: ['http://a:1']", "evnts: x", r"\(did you mean 'events'\?\)"),
        ("kind: fake", "answer: x", r"there is no option 'answer'"),
    ],
)
def test_an_option_that_the_pools_kind_does_not_have_is_a_mistake_with_its_line(
    tmp_path: Path, pool: str, option: str, sentence: str
) -> None:
    path = tmp_path / "sla.yaml"
    path.write_text(f"pools:\n  p: {{{pool}, options: {{\n    {option}}}}}")
    name = option.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"sla.yaml:3: pools.p.options.{name}: .*{sentence}"):
        ConfigFile(path, {}).read()


def test_options_of_a_kind_that_is_misspelled_are_not_judged_as_those_of_another(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    path.write_text("pools:\n  p: {kind: vlm, at: 'http://a:1', options: {priority: true}}")
    with pytest.raises(ConfigError) as caught:
        ConfigFile(path, {}).read()
    assert "sla.yaml:2: pools.p.kind: there is no kind of backend 'vlm'" in str(caught.value)
    assert "no option" not in str(caught.value)


def test_options_of_local_shards_and_of_feeds_are_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    shards = "{dtype: int8, threads: 2, kv-memory: 0.5, deterministic: true, speculate: off, attach_s: 60}"
    path.write_text(
        f"pools: {{own: {{local: 1, options: {shards}}}, "
        "v: {kind: vllm, at: ['http://a:1'], options: {events: 'tcp://*:5557', priority: true, served: [a, b]}}}"
    )
    pools = ConfigFile(path, {}).read().config.pools
    assert pools["own"].options["kv-memory"] == "0.5"


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    with pytest.raises(ConfigError, match=r"cannot read .*sla\.yaml"):
        ConfigFile(path, {}).read()
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"cannot read .*sla\.yaml"):
        ConfigFile(path, {}).read()


def test_what_may_have_no_end_is_refused_at_once(tmp_path: Path) -> None:
    pipe, folder, large = tmp_path / "pipe", tmp_path / "folder", tmp_path / "large"
    os.mkfifo(pipe)
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for path, what in (
        (pipe, "a pipe or a device"),
        (Path("/dev/zero"), "a pipe or a device"),
        (folder, "a directory"),
        (large, "more than 8 MiB"),
    ):
        with pytest.raises(ConfigError, match=f"cannot read {path}: it (is|has) {what}"):
            ConfigFile(path, {}).read()
        sla = tmp_path / "sla.yaml"
        sla.write_text(f'tenants: {{a: {{keys: ["${{file:{path}}}"]}}}}')
        with pytest.raises(ConfigError, match=f"cannot read {path}: it (is|has) {what}"):
            ConfigFile(sla, {}).read()


def test_a_stamp_differs_when_the_file_changes_or_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    file = ConfigFile(path, {})
    stamps = [file.stamp()]
    path.write_text("a")
    stamps.append(file.stamp())
    os.utime(path, ns=(1, 1))
    stamps.append(file.stamp())
    path.write_text("ab")
    os.utime(path, ns=(1, 1))
    stamps.append(file.stamp())
    other = tmp_path / "new.yaml"
    other.write_text("xy")
    os.utime(other, ns=(1, 1))
    other.replace(path)
    stamps.append(file.stamp())
    assert stamps[0] is None
    assert len(set(stamps)) == 5


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "its file of keys cannot be read: {place}: No such file or directory"),
        ("", "its key document is not JSON"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "its key document has no key that can verify a signature"),
        ('{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}', None),
    ],
)
def test_an_issuers_file_of_keys_is_looked_at_when_the_file_is_read(
    tmp_path: Path, document: str | None, words: str | None
) -> None:
    place = tmp_path / "keys.json"
    if document is not None:
        place.write_text(document)
    path = tmp_path / "sla.yaml"
    issuer = f"{{issuer: 'https://login.example.com', audience: a, jwks: '{place}'}}"
    rules = "[{tenant: acme}]"
    path.write_text(f"tenants: {{acme: {{}}}}\nidentity: {{issuers: {{corp: {issuer}}}, rules: {rules}}}")
    doubts = ConfigFile(path, {}).read().doubts
    assert len(doubts) == (words is not None)
    if words is not None:
        assert words.format(place=place) in doubts[0]
    assert ConfigFile(path, {}, may_be_absent=True).read().doubts == ()
