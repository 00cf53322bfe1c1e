"""How the sidecar of a model is found, and the entry-point seams."""

import sys
import textwrap

import pytest
from torch import nn

from shardwalk.mesh import MeshContext
from shardwalk.parallelizer_core import (
    ModelParallelizer,
    get_model_parallelizer,
    parallelize_model,
    plugins,
    register_parallelizer,
)
from shardwalk.parallelizer_core.model_parallelizer import _DEFAULT_PARALLELIZER, _registered


class Foreign(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Derived(Foreign):
    pass


class Recording(ModelParallelizer):
    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    def parallelize(self, model, mesh_context, /):
        self.seen.append(model)
        return model


@pytest.fixture(autouse=True)
def fresh_registry():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)
    plugins._sidecar_points.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with entry points on the path."""

    def install(name: str, entry_points: str, module: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        (tmp_path / f"{name}_module.py").write_text(textwrap.dedent(module))
        monkeypatch.syspath_prepend(str(tmp_path))
        plugins._sidecar_points.cache_clear()

    yield install
    for name in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[name]


def test_order_of_resolution():
    class Owning(Foreign):
        parallelizer = Recording()

    assert get_model_parallelizer(Foreign()) is _DEFAULT_PARALLELIZER
    registered = Recording()
    register_parallelizer(Foreign, registered)
    assert get_model_parallelizer(Derived()) is registered
    assert get_model_parallelizer(Owning()) is Owning.parallelizer


def test_parallelize_model_goes_through_the_sidecar():
    sidecar, model = Recording(), Foreign()
    register_parallelizer(Foreign, sidecar)
    assert parallelize_model(model, MeshContext()) is model
    assert sidecar.seen == [model]


@pytest.mark.parametrize("broken", [object(), "name", 0, Recording])
def test_a_sidecar_without_parallelize_is_a_type_error(broken):
    class Broken(nn.Linear):
        parallelizer = broken

    with pytest.raises(TypeError, match="no callable parallelize"):
        get_model_parallelizer(Broken(2, 2))
    with pytest.raises(TypeError, match="no callable parallelize"):
        register_parallelizer(Foreign, broken)


def test_a_sidecar_that_returns_no_model_is_a_type_error():
    class Forgetful(ModelParallelizer):
        def parallelize(self, model, mesh_context, /):
            return None

    register_parallelizer(Foreign, Forgetful())
    with pytest.raises(TypeError, match="must return the model"):
        parallelize_model(Foreign(), MeshContext())


def test_only_module_classes_are_registered():
    with pytest.raises(TypeError, match="subclass of torch.nn.Module"):
        register_parallelizer(int, Recording())


def test_an_entry_point_that_leads_nowhere_is_named(install):
    install(
        "broken",
        f"""
        [shardwalk.sidecars]
        {Foreign.__module__}.{Foreign.__qualname__} = broken_module:missing
        """,
        "",
    )
    with pytest.raises(ValueError, match=r"Foreign.* by broken \(broken_module:missing\) cannot"):
        get_model_parallelizer(Foreign())


def test_an_installed_package_registers_a_sidecar_for_a_class_it_does_not_own(install):
    install(
        "sidecars",
        f"[shardwalk.sidecars]\n{Foreign.__module__}.Foreign = sidecars_module:SIDECAR\n",
        "class S:\n    def parallelize(self, model, context): return model\nSIDECAR = S()\n",
    )
    assert type(get_model_parallelizer(Derived())).__name__ == "S"


def test_two_installed_sidecars_for_one_class_are_refused(install):
    for name in ("first", "second"):
        install(
            name,
            f"[shardwalk.sidecars]\n{Foreign.__module__}.Foreign = {name}_module:SIDECAR\n",
            "SIDECAR = None\n",
        )
    with pytest.raises(ValueError, match="first .*second"):
        get_model_parallelizer(Foreign())


def test_no_expert_parallel_provider_says_what_to_install():
    with pytest.raises(ImportError, match="install shardwalk-moe-ep"):
        plugins.expert_parallel_provider()
    with pytest.raises(ValueError, match="ep_size=1"):
        plugins.expert_parallel_provider()


def test_the_expert_parallel_provider_is_loaded_and_two_are_refused(install):
    point = "[shardwalk.expert_parallel]\nwalk = {0}_module:walk\n"
    install(
        "experts", point.format("experts"), "def walk(model, context, sidecar): return 'walked'\n"
    )
    assert ModelParallelizer()._apply_moe(Foreign(), MeshContext()) == "walked"
    install("others", point.format("others"), "walk = None\n")
    with pytest.raises(ValueError, match="experts .*others"):
        plugins.expert_parallel_provider()


class Finalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[MeshContext] = []

    def finalize_parallelization(self, mesh_context):
        self.calls.append(mesh_context)


def test_modules_finalize_after_the_sidecar_without_any_mesh():
    model, context = nn.Sequential(Finalizing(), nn.Linear(2, 2)), MeshContext()
    parallelize_model(model, context)
    assert model[0].calls == [context]
