"""Pickling by reference that also reaches modules which cannot be imported by name.

Test modules under pytest's importlib mode, and a script's ``__main__``, exist in ``sys.modules`` of
the parent only. A payload therefore carries the files of the modules it refers to, and a rank loads
them under the same name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

# multiprocessing keeps this alias of ``__main__`` in every parent, so results pickle back too.
_MAIN_IN_RANKS = "__mp_main__"


class _Recorder(pickle.Pickler):
    """A pickler that notes the module of every class and function it refers to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            self.modules.add(obj.__module__)
        return NotImplemented


class _Loader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            module = _MAIN_IN_RANKS
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found


def dumps_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle a call for the ranks.

    Raises:
        TypeError: the function is a lambda or a closure, or something cannot be pickled.
    """
    _check_function(function)
    buffer = io.BytesIO()
    recorder = _Recorder(buffer)
    try:
        recorder.dump((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_name_of(function)} and its arguments go to the ranks by pickle: {error}"
        ) from error
    files = {name: _file_of(name, function) for name in sorted(recorder.modules)}
    return pickle.dumps((list(sys.path), files, buffer.getvalue()))


def loads_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The inverse of `dumps_call`, in a rank."""
    sys.path[:], files, payload = pickle.loads(data)
    for name, file in files.items():
        if file is not None:
            _ensure_module(_MAIN_IN_RANKS if name == "__main__" else name, file)
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    call = _Loader(io.BytesIO(payload)).load()
    return call


def _check_function(function: Callable[..., Any]) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", "")
    if "<lambda>" in name or "<locals>" in name:
        raise TypeError(
            f"{name} cannot be sent to the ranks: it is a lambda or is defined inside a function; "
            "define it at the top level of its module and pass what it needs as arguments"
        )


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


def _file_of(module: str, function: Callable[..., Any]) -> str | None:
    """The source file of a module, None for built-in ones."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and module == "__main__":
        raise TypeError(
            f"{_name_of(function)} or an argument is defined in an interactive session, which the "
            "ranks cannot load; move it into a .py file and import it"
        )
    return file


def _ensure_module(name: str, file: str) -> None:
    loaded = sys.modules.get(name)
    if name == _MAIN_IN_RANKS and getattr(loaded, "__file__", None) != file:
        _load_file(name, file)  # until then the name means the rank's own start-up code
        return
    if loaded is not None:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == file:
        importlib.import_module(name)
        return
    _load_file(name, file)


def _load_file(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"a rank cannot load module {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
