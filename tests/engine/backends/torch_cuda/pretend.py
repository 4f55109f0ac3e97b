"""A GPU that is not there: tensors that know they lie on it, and graphs of what was recorded.

Memory is the host's, and all work is done at once. What a real device refuses is refused: operands
on both sides, numbers read where they do not lie, kernels that are given the host's tensors, work
during a capture that a graph cannot hold. A graph does what was recorded over the memory that was
there, and nothing that the host's code around it would do today.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
FREE_BYTES, TOTAL_BYTES = 6 << 30, 8 << 30

# Both sides may meet here.
_COPIES = frozenset(("copy_", "to", "cpu", "cuda", "type_as"))
# The host waits for the device and gets numbers,
_TOLD = frozenset(("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__",
                   "equal", "allclose", "__contains__", "__format__", "__repr__"))  # fmt: skip
# or something as large as the device says.
_WAITS = _TOLD | {"nonzero", "masked_select", "unique"}


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class Pretending(TorchFunctionMode):
    """Sees what makes tensors on the device, in one thread; tensors themselves know the rest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Recording(threading.local):
    graph: Graph | None = None


_recording = _Recording()


def is_there(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, OnDevice)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return str(name)


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    name = _name(func)
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if is_there(t)]
    if name.endswith(".__get__"):
        return _property(func, name, tensors[0])
    requested = _asked_device(name, args, kwargs)
    if there:
        _check(name, tensors, requested, at=args[1] if len(args) > 1 else None)
    goes = bool(there) and name not in _TOLD if requested is None else requested.type == "cuda"
    if kwargs.pop("pin_memory", False) and goes:
        raise RuntimeError("only memory of the host can be pinned")
    if name == "pin_memory":
        return tensors[0].clone()
    args, kwargs = _without_device(name, args, kwargs)
    graph = _recording.graph
    if graph is not None:
        graph.touch(there)
    result = _run(func, name, args, kwargs)
    crosses = requested is not None and bool(there) != goes
    if crosses and isinstance(result, torch.Tensor) and tensors:
        with torch._C.DisableTorchFunctionSubclass():
            is_same = result.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
            result = result.clone() if is_same else result
    result = tree_map(lambda value: _placed(value, goes), result)
    if graph is not None and (goes or there):
        graph.note(func, args, kwargs, result)
    return result


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "mm" and kwargs.get("out_dtype") is not None:  # a GPU's alone
        kwargs = dict(kwargs)
        out_dtype = kwargs.pop("out_dtype")
        args = tree_map(lambda x: x.to(out_dtype) if isinstance(x, torch.Tensor) else x, args)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _placed(value: Any, there: bool) -> Any:
    if not isinstance(value, torch.Tensor) or is_there(value) == there:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(OnDevice if there else torch.Tensor)


def _property(func: Any, name: str, tensor: torch.Tensor) -> Any:
    if name == "device.__get__" and is_there(tensor):
        return DEVICE
    if name == "is_cuda.__get__":
        return is_there(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        value = func(tensor)
    value = tree_map(lambda x: _placed(x, is_there(tensor)), value)
    if _recording.graph is not None and isinstance(value, torch.Tensor):
        _recording.graph.note(func, (tensor,), {}, value)
    return value


def _asked_device(name: str, args: Any, kwargs: Any) -> torch.device | None:
    if name in ("cpu", "cuda"):
        return torch.device(name)
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if name == "to":
        for value in args[1:]:
            if isinstance(value, torch.device):
                return value
            if isinstance(value, str):
                return torch.device(value)
            if isinstance(value, torch.Tensor):
                return value.device
    return None


def _without_device(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    host = torch.device("cpu")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": host}
    if name == "to":
        args = tuple(host if isinstance(a, (torch.device, str)) else a for a in args)
    return args, kwargs


def _check(
    name: str, tensors: list[torch.Tensor], requested: torch.device | None, *, at: Any
) -> None:
    if name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    if name == "pin_memory":
        raise RuntimeError("only memory of the host can be pinned")
    if _recording.graph is not None and name in _WAITS:
        raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
    if name in _COPIES or requested is not None:
        return
    if name == "__setitem__" and not any(isinstance(i, torch.Tensor) for i in tree_flatten(at)[0]):
        return  # a copy
    for tensor in tensors:
        if not is_there(tensor) and tensor.dim():
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                f"devices, cuda:0 and cpu ({tuple(tensor.shape)})"
            )


# ── graphs ──


class Graph:
    """What was done on the device while it was captured, and can be done again."""

    def __init__(self) -> None:
        self._work: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # storages
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def touch(self, tensors: list[torch.Tensor]) -> None:
        """What may be written to is put back after the capture, in which nothing runs."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self._made and key not in self._before:
                    now = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._before[key] = now, now.clone()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._work.append((func, args, kwargs, result))
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    key = value.untyped_storage().data_ptr()
                if key not in self._before:
                    self._made.add(key)

    def undo(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for now, before in self._before.values():
                now.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, result in self._work:
                again = _run(func, _name(func), args, kwargs)
                if result is None:
                    continue
                new, old = tree_flatten(again)[0], tree_flatten(result)[0]
                for one, other in zip(new, old, strict=True):
                    if isinstance(other, torch.Tensor) and one.data_ptr() != other.data_ptr():
                        with torch._C.DisableTorchFunctionSubclass():
                            other.copy_(one)


@contextlib.contextmanager
def _capture(graph: Graph, **_: Any) -> Any:
    assert _recording.graph is None, "a capture within a capture"
    _recording.graph = graph
    try:
        yield
    finally:
        _recording.graph = None
        graph.undo()


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._is_recorded = False

    def record(self, stream: Any = None) -> None:
        assert _recording.graph is None, "an event of the host within a graph"
        self._is_recorded = True

    def synchronize(self) -> None:
        assert _recording.graph is None, "the host waits within a graph"
        assert self._is_recorded

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        assert event._is_recorded

    def synchronize(self) -> None:
        pass


class _Cudart:
    """Memory of the host that is pinned by its address."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0


def _must_not_capture(*_: Any) -> None:
    assert _recording.graph is None, "the host waits within a graph"


def install(monkeypatch: Any) -> None:
    """For as long as the patches last. Kernels of Triton's interpreter take the device's only."""
    properties = SimpleNamespace(
        multi_processor_count=4, name="pretended", total_memory=TOTAL_BYTES
    )
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "pretended",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": _must_not_capture,
        "synchronize": _must_not_capture,
        "current_stream": lambda device=None: _Stream(),
        "Event": _Event,
        "Stream": _Stream,
        "_sleep": lambda cycles: None,
        "cudart": lambda: _Cudart,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "graph": _capture,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", _Generator)

    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not is_there(value):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        graph = _recording.graph
        if graph is not None:
            values = (*args, *kwargs.values())
            graph.touch([value for value in values if isinstance(value, torch.Tensor)])
        _launch(launch, self, args, kwargs)
        if graph is not None:
            graph.note(_Launch(launch, self), args, kwargs, None)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked)


class _Launch:
    def __init__(self, launch: Any, executor: Any) -> None:
        self._launch, self._executor = launch, executor

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _launch(self._launch, self._executor, args, kwargs)


def _launch(launch: Any, executor: Any, args: Any, kwargs: Any) -> None:
    plain = [_placed(a, False) for a in args]
    named = {k: _placed(v, False) for k, v in kwargs.items()}
    recording, _recording.graph = _recording.graph, None
    try:
        with torch._C.DisableTorchFunction():
            launch(executor, *plain, **named)
    finally:
        _recording.graph = recording
