"""Adapters (LoRA) in memory: their names, what a load reports, and which files are refused before
anything is computed. tests/conformance/test_adapters.py compares what is computed."""

import re
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import trio

from engine.config import ADAPTER_FILES, AdapterConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError, InvalidRequest, SpawnFailed
from engine.pool.adapter_version import AdapterVersion
from engine.pool.adapters import Adapters
from engine.pool.first_adapters import load_all
from engine.pool.registry import Registry
from engine.status import Capability, ModelState
from engine.worker.load.adapter_config import read_form
from engine.worker.load.refusal import Refusal
from engine.worker.text.interface import AdapterInfo
from grpc_service.app import application
from grpc_service.app.server_config import ServerConfig
from grpc_service.client import messages
from grpc_service.services.operations_codec import decode_load_adapter
from tests.support.adapter_files import files_in
from tests.unit.test_cli import configs

CONFIG, WEIGHTS = ADAPTER_FILES


def registry_of(*adapters):
    """Return the registry of the model ``m`` with adapters."""
    models = (ModelConfig("m", name="m", adapters=adapters),)
    return Registry(EngineConfig(models=models), lambda model: Capability.TEXT_TO_TEXT)


def put(registry, name, aliases=()):
    """Give an adapter its names, as a load does. Return its base's entry and its version."""
    entry, config = registry.adapter_config(name, "d", aliases)
    registry.require_names(entry, config)
    version = AdapterVersion("m", config)
    registry.set_adapter(entry, version)
    return entry, version


# ---- names


def test_an_alias_that_is_given_twice_counts_once():
    """An adapter that names an alias twice can be replaced and unloaded like any other."""
    registry = registry_of()
    put(registry, "m:x", ("a", "a"))
    entry, version = put(registry, "m:x", ("a", "b", "a"))
    assert version.config.aliases == ("a", "b")
    registry.forget_adapter(entry, version)
    assert not entry.adapters
    assert [registry.find_adapter(name) for name in ("m:x", "a", "b")] == [None] * 3


def test_the_own_name_is_refused_as_an_alias():
    with pytest.raises(InvalidRequest, match="aliases: m:x is the adapter's own name"):
        put(registry_of(), "m:x", ("m:x",))


def test_of_two_loads_with_one_alias_the_later_one_is_refused():
    """Both loads may begin: the names are checked when a load begins and again when it ends."""
    registry = registry_of()
    entry, config = registry.adapter_config("m:y", "d", ("a",))
    _, first = put(registry, "m:x", ("a",))
    with pytest.raises(InvalidRequest, match="aliases: a is the name of another model"):
        registry.require_names(entry, config)
    assert registry.find_adapter("a") is first


def test_forgetting_a_version_leaves_names_that_stand_for_another_one():
    registry = registry_of()
    entry, old = put(registry, "m:x", ("a",))
    _, new = put(registry, "m:x", ("a",))
    registry.forget_adapter(entry, old)
    assert registry.find_adapter("m:x") is registry.find_adapter("a") is new
    assert list(entry.adapters.values()) == [new]


def test_a_divided_model_takes_no_adapters():
    """Neither a divided model's configuration nor a later load may name adapters."""
    with pytest.raises(ConfigError, match="a divided model takes none"):
        ModelConfig("m", tp=2, adapters=(AdapterConfig("x", "d"),))
    models = (ModelConfig("m", name="m", tp=2),)
    registry = Registry(EngineConfig(models=models), lambda model: Capability.TEXT_TO_TEXT)
    with pytest.raises(InvalidRequest, match="model: m is divided among 2 processes"):
        put(registry, "m:x")


# ---- loads


class Store:
    """Stands in for a runner's adapters; ``loaded`` lists them. ``fail`` is raised by each load."""

    def __init__(self, fail=None):
        self.loaded, self.fail = [], fail

    def measure(self, directory):
        return 10

    def load(self, directory):
        """Note the directory; its name stands for the digest of its content."""
        if self.fail is not None:
            raise self.fail
        self.loaded.append(directory)
        return AdapterInfo(directory, 10)

    def unload(self, digest):
        self.loaded.remove(digest)


class Jobs:
    """Runs each job after a second of virtual time."""

    async def run_for_load(self, job):
        await trio.sleep(1)
        return job()


@asynccontextmanager
async def adapters_of(registry, replicas=()):
    """Yield the pool's adapters over a base that is loaded."""
    registry.entries["m"].replicas.extend(replicas)

    @asynccontextmanager
    async def acquire(name, capability):
        yield

    leases = SimpleNamespace(acquire=acquire)
    governor = SimpleNamespace(
        notify_freed=lambda: None, grow=lambda name, reservation, size: reservation.change(size)
    )
    async with trio.open_nursery() as nursery:
        start = nursery.start_soon
        yield Adapters(registry, leases, governor, Jobs(), start, 1.0)


def replica_with(store, **adapters):
    """Return a replica that serves."""
    return SimpleNamespace(
        tools=SimpleNamespace(adapters=store), adapters=dict(adapters), reservation=Mock(),
        is_retired=False, loop=SimpleNamespace(is_hung=False), is_ready=True,
    )  # fmt: skip


async def test_two_loads_at_once_never_share_an_alias(autojump_clock, monkeypatch):
    """One of two such loads is refused when it ends, and the adapter that it loaded is dropped."""
    registry, store = registry_of(), Store()
    entry = registry.entries["m"]
    monkeypatch.setattr(type(entry), "ready", property(lambda self: self.replicas))
    refused = []

    async def load(adapters, name):
        try:
            await adapters.load(name, name[2:], ("a",))
        except InvalidRequest:
            refused.append(name)

    monkeypatch.setattr(type(entry), "adapter_status", lambda self, version: None)
    async with adapters_of(registry, [replica_with(store)]) as adapters, trio.open_nursery() as two:
        for name in ("m:x", "m:y"):
            two.start_soon(load, adapters, name)
    [lost] = refused
    [kept] = {"m:x", "m:y"} - {lost}
    assert registry.find_adapter("a").name == kept
    assert store.loaded == [kept[2:]]


async def test_a_replica_that_is_loaded_drops_what_is_unloaded_meanwhile(autojump_clock):
    """The memory of an adapter that is unloaded during the load is free once the replica serves."""
    registry = registry_of(AdapterConfig("x", "x"), AdapterConfig("y", "y"))
    entry, store, found = registry.entries["m"], Store(), {}
    async with adapters_of(registry) as adapters, trio.open_nursery() as nursery:

        async def load():
            found.update(await load_all(entry, SimpleNamespace(adapters=store), Jobs()))

        nursery.start_soon(load)
        await trio.sleep(1.5)  # when the first of two adapters is loaded
        assert store.loaded == ["x"]
        await adapters.unload("m:x")
    assert store.loaded == ["y"]
    assert [version.name for version in found] == ["m:y"]


async def test_files_that_changed_are_not_kept_by_a_replica_that_loads(autojump_clock, monkeypatch):
    """Another replica has the adapter's former content, so this load is refused and freed."""
    registry, store = registry_of(AdapterConfig("x", "new")), Store()
    entry = registry.entries["m"]
    [version] = entry.adapters.values()
    other = replica_with(Store())
    other.adapters[version] = AdapterInfo("old", 10)
    monkeypatch.setattr(type(entry), "ready", property(lambda self: self.replicas))
    entry.replicas = [other]
    found = await load_all(entry, SimpleNamespace(adapters=store), Jobs())
    assert not found
    assert not store.loaded
    assert "changed since" in str(version.error)


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (SpawnFailed("it is damaged", log_detail="at byte 7"), "it is damaged [at byte 7]"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
async def test_the_log_says_why_an_adapter_did_not_load(
    error, logged, autojump_clock, monkeypatch, caplog
):
    """Loads by RPC and at a start log the reason, even where clients get a shorter one."""
    registry, store = registry_of(AdapterConfig("x", "x")), Store(fail=error)
    entry = registry.entries["m"]
    monkeypatch.setattr(type(entry), "ready", property(lambda self: self.replicas))
    async with adapters_of(registry, [replica_with(store)]) as adapters:
        with pytest.raises(SpawnFailed, match="m:y: "):
            await adapters.load("m:y", "y")
        await load_all(entry, SimpleNamespace(adapters=store), Jobs())
    texts = [record.getMessage() for record in caplog.records]
    for name in ("m:y", "m:x"):
        [text] = [one for one in texts if name in one]
        assert text.startswith(f"the adapter {name} did not load: ")
        assert text.endswith(logged)


# ---- files


def test_deep_json_is_refused():
    """Python's parser raises RecursionError for deep JSON."""
    with pytest.raises(Refusal, match="is not JSON"):
        read_form(b"[" * 200_000)


def decoded(root, directory):
    """Return the directory from which LoadAdapter reads."""
    message = messages.LoadAdapterRequest(model="m:x", directory=directory)
    return decode_load_adapter(message, str(root))[1]


def test_links_of_files_lead_nowhere_but_below_the_root(tmp_path):
    """A link inside the root is followed: Hugging Face's cache has such links."""
    root, private = tmp_path / "root", files_in(tmp_path / "private")
    files_in(root / "blobs")
    for name, source in (("inside", root / "blobs"), ("outside", private)):
        (root / name).mkdir()
        for file in (CONFIG, WEIGHTS):
            (root / name / file).symlink_to(source / file)
    assert decoded(root, "inside") == str(root / "inside")
    for file in (CONFIG, WEIGHTS):
        with pytest.raises(InvalidRequest, match="directory: is not below"):
            decoded(root, "outside")
        (root / "outside" / file).unlink()
    assert decoded(root, "outside") == str(root / "outside")


def test_without_a_root_nothing_is_loaded_and_a_root_may_be_a_link(tmp_path):
    """The root itself is not accepted as an adapter, nor is any folder outside the root."""
    for directory in ("sql", str(tmp_path), "/"):
        with pytest.raises(InvalidRequest, match="without --adapter-root"):
            decoded("", directory)
    root = tmp_path / "root"
    files_in(root / "sql")
    files_in(tmp_path / "root-2" / "sql")
    (tmp_path / "link").symlink_to(root)
    assert decoded(tmp_path / "link", "sql") == str(root / "sql")
    assert decoded(tmp_path / "link", str(tmp_path / "link" / "sql")) == str(root / "sql")
    for directory in (
        ".",
        "",
        "..",
        "../root-2/sql",
        str(tmp_path / "root-2/sql"),
        "sql/../..",
        "a\0",
    ):
        with pytest.raises(InvalidRequest, match="directory: "):
            decoded(tmp_path / "link", directory)


NAME = "model.layers.12.self_attn.q_proj"


def form_of(tmp_path, **fields):
    """Return what the engine reads from an adapter's config with these fields."""
    return read_form((files_in(tmp_path, **fields) / CONFIG).read_bytes())


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_that_takes_too_long_is_refused_and_holds_nobody_up(tmp_path, field):
    """Other threads run while the pattern is matched."""
    slow = "([a-z_.0-9]|[a-z_.0-9][a-z_.0-9])*[!-+]"
    form = form_of(tmp_path, **{field: {slow: 3} if field == "rank_pattern" else slow})
    with pytest.raises(Refusal, match="takes too long"):
        form.has(NAME, "lm_head") and form.rank_of(NAME)


def test_a_group_in_a_pattern_is_not_the_layers_number(tmp_path):
    """As in peft, a layer's number comes from a named group alone."""
    form = form_of(tmp_path, layers_to_transform=[12], layers_pattern="(layers|h)")
    assert form.has(NAME, "lm_head")
    assert not form.has(NAME.replace("12", "1"), "lm_head")


def test_a_tilde_is_the_home_in_settings_and_a_name_in_requests(tmp_path, monkeypatch):
    """A shell does not expand ``~`` behind an equals sign, as in ``--adapter-root=~/x``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert AdapterConfig("x", "~/sql").directory == str(tmp_path / "sql")
    assert ServerConfig(adapter_root="~/adapters").adapter_root == str(tmp_path / "adapters")
    assert decoded(tmp_path, "~/sql") == str(tmp_path / "~" / "sql")


# ---- settings


TWO = """
adapter_root = "/srv/adapters"
[[models]]
model = "m"
name = "base:v2"
[[models.adapters]]
name = "sql"
directory = "/srv/sql"
aliases = ["database"]
[[models.adapters]]
name = "tales"
directory = "/srv/tales"
"""


def test_a_file_and_flags_give_a_model_its_adapters(tmp_path):
    """Adapters of flags are added to those of the file. A base's name may have colons, an adapter's
    may not."""
    path = tmp_path / "triolet.toml"
    path.write_text(TWO)
    engine, server = configs("--config", str(path), "--adapter", "base:v2:more=/srv/more=1")
    [model] = engine.models
    assert model.adapters == (
        AdapterConfig("sql", "/srv/sql", ("database",)),
        AdapterConfig("tales", "/srv/tales"),
        AdapterConfig("more", "/srv/more=1"),
    )
    assert server.adapter_root == "/srv/adapters"
    assert model.names == ("base:v2", "base:v2:sql", "database", "base:v2:tales", "base:v2:more")


@pytest.mark.parametrize(
    ("change", "argv", "said"),
    [
        (('name = "sql"', 'name = "a:b"'), (), "models[0].adapters[0]: the adapter's name 'a:b'"),
        (('name = "sql"', 'title = "x"'), (), "models[0].adapters[0].title"),
        (('directory = "/srv/tales"', ""), (), "models[0].adapters[1].directory is missing"),
        (('name = "tales"', 'name = "sql"'), (), "two models are served as 'base:v2:sql'"),
        (('"database"', '"base:v2"'), (), "two models are served as 'base:v2'"),
        (
            ("", ""),
            ("--adapter", "other:x=/d"),
            "has the base 'other', but the models are: base:v2",
        ),
    ],
)
def test_settings_of_adapters_that_cannot_be_are_refused_by_name(tmp_path, change, argv, said):
    path = tmp_path / "triolet.toml"
    path.write_text(TWO.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(said)):
        configs("--config", str(path), *argv)


# ---- a start


@pytest.mark.parametrize("adapters", [(), ("x",)])
def test_a_start_says_why_its_only_model_failed_whether_or_not_it_has_adapters(adapters):
    """Adapters are listed as models, but the start waits for none of them."""
    registry = registry_of(*(AdapterConfig(name, "d") for name in adapters))
    failed = SimpleNamespace(
        name="m", state=ModelState.FAILED, error="its directory is empty", base=""
    )
    also = SimpleNamespace(state=ModelState.FAILED, error="its base failed", base="m")
    listed = [failed, *[also for _ in adapters]]
    engine = SimpleNamespace(list_models=lambda: listed, registry=registry)
    assert application._failure(engine) == "m: its directory is empty"
