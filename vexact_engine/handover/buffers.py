"""Memory that two processes see: the buckets that weights travel in.

Neither kind has a name that could be left behind: the host's is an anonymous file that ends with the last process that
has it open, a GPU's belongs to the process that took it. A set of buffers is made once and kept: exported once, opened
once.
"""

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HandoverFailed
from ..weights.update import Piece
from . import messages as m
from .session import READ, Reading

HOST, CUDA = "shared memory", "CUDA IPC"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # whoever reads what was cut off ends by SIGBUS
_FILE = struct.Struct("<qq")  # process, descriptor
_PREFIX = "vexact-weights-"  # of the files' names, which /proc shows
_MOST_FOUND = 100_000  # views of buckets that are kept
_DL_CUDA, _DL_UINT = 2, 1  # dlpack.h: a kind of device, a kind of number


class Buckets:
    """Some buffers of one size, made here. `tensors` are their bytes, `handles` what another process opens.

    kind     HOST or CUDA
    device   whose memory, for CUDA
    raises   HandoverFailed where there is no room
    """

    def __init__(self, kind: str, size: int, count: int, device: torch.device | None = None):
        self.kind, self.size, self.device = kind, size, device
        self.name = secrets.token_hex(8)
        self.tensors: list[Tensor] = []
        self.handles: list[bytes] = []
        self._owned: list = []
        self._parts: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        try:
            for _ in range(count):
                self._add()
        except BaseException:
            self.close()
            raise

    def _add(self) -> None:
        if self.kind == CUDA:
            memory = _CudaMemory.taken(self.size, self.device)
            self._owned.append(memory)
            self.tensors.append(memory.tensor())
            self.handles.append(memory.handle())
            return
        memory = HostMemory.made(self.name, self.size, pin=self.device is not None and self.device.type == "cuda")
        self._owned.append(memory)
        self.tensors.append(memory.tensor)
        self.handles.append(memory.handle)

    def space(self, buffer: int) -> "BucketSpace":
        return BucketSpace(self, buffer, self.size)

    def offer(self) -> m.Offer:
        gpu = gpu_name(self.device) if self.kind == CUDA else ""
        return m.Offer(self.kind, self.name, self.size, self.handles, gpu)

    def part(self, buffer: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements from a byte on. Set by set they are the same ones, which takes time to make."""
        key = buffer, offset, count, dtype
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) > _MOST_FOUND:
                self._parts.clear()
            found = self.tensors[buffer][offset : offset + count * dtype.itemsize].view(dtype)
            self._parts[key] = found
        return found

    def close(self) -> None:
        self.tensors.clear()
        self._parts.clear()
        while self._owned:
            self._owned.pop().close()


class BucketSpace(NamedTuple):
    """One of them, to be filled: see packing.Space."""

    buffers: Buckets
    number: int
    size: int

    def part(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.buffers.part(self.number, offset, count, dtype)


class OpenedBuckets:
    """The same buffers in the other process.

    gpu      whose memory it is, for CUDA: see gpu_name
    device   that reads them: its tensors they are, another GPU's memory too, which takes no context there. Host memory
             is pinned for a GPU
    raises   HandoverFailed, saying what stands in the way, where they do not open
    """

    def __init__(self, kind: str, name: str, size: int, handles: list[bytes], gpu: str, device: torch.device):
        self.name, self.tensors = name, []
        self._owned: list = []
        if kind not in (HOST, CUDA):
            raise HandoverFailed(f"weights: {kind!r} is no kind of memory, expected {HOST!r} or {CUDA!r}")
        if kind == CUDA:
            whose = gpu_named(gpu)
            if whose is None:
                raise HandoverFailed(f"weights: CUDA IPC: process {os.getpid()} does not see the GPU {gpu}")
            device = _reader(device, whose)
        try:
            for handle in handles:
                if kind == CUDA:
                    memory = _CudaMemory.opened(handle, size, device)
                    self._owned.append(memory)
                    self.tensors.append(memory.tensor())
                else:
                    memory = HostMemory.opened(handle, name, size, pin=device.type == "cuda")
                    self._owned.append(memory)
                    self.tensors.append(memory.tensor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.tensors.clear()
        while self._owned:
            self._owned.pop().close()


class Memories:
    """A sender's buffers as this process has opened them: each set once.

    device   that computes with what lies in them
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._opened: dict[str, OpenedBuckets] = {}
        self._now = ""  # the last that was opened
        self._found: dict[tuple[str, int, m.Part], Tensor | Piece] = {}  # a sender says the same again and again

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, offer: m.Offer) -> None:
        """What the next buckets lie in. HandoverFailed where it cannot be opened."""
        if offer.name not in self._opened:
            given = offer.kind, offer.name, offer.size, offer.handles, offer.gpu
            self._opened[offer.name] = OpenedBuckets(*given, self.device)
        self._now = offer.name

    def values(self, bucket: m.Bucket) -> list[tuple[str, Tensor | Piece]]:
        """What lies in a bucket, by name: no copies. HandoverFailed where it is not what was sent."""
        memory = self._memory(bucket)
        if len(self._found) > _MOST_FOUND:
            self._found.clear()
        return values(bucket, memory, self._found, bucket.memory or self._now)

    def _memory(self, bucket: m.Bucket) -> Tensor:
        name = bucket.memory or self._now
        if bucket.memory and name not in self._opened:  # other machines' stages have memory of their own, one set of it
            raise HandoverFailed(
                "weights: a bucket lies in memory that is not open here: shards go to an engine whose stages are all "
                "on the trainer's host; send whole tensors (WeightSender) to one on several"
            )
        tensors = self._opened[name].tensors if name in self._opened else []
        if not 0 <= bucket.buffer < len(tensors):
            raise HandoverFailed(f"weights: the sender filled bucket {bucket.buffer} of {len(tensors)}")
        return tensors[bucket.buffer]

    def bytes(self, bucket: m.Bucket) -> bytes:
        """Of all that lies in a bucket, for a process that cannot open it."""
        self.values(bucket)
        return self._memory(bucket)[: _used(bucket)].cpu().numpy().tobytes()

    def fence(self) -> Reading:
        """Done once what this thread has given the device to read from them is."""
        every = (tensor for opened in self._opened.values() for tensor in opened.tensors[:1])
        devices = {device for device in (self.device, *(t.device for t in every)) if device.type == "cuda"}
        return Reading([torch.cuda.current_stream(device).record_event() for device in devices]) if devices else READ

    def close(self) -> None:
        self._now = ""
        self._found.clear()
        while self._opened:
            self._opened.popitem()[1].close()


def values(
    bucket: m.Bucket, memory: Tensor, known: dict[tuple[str, int, m.Part], Tensor | Piece] | None = None, name: str = ""
) -> list[tuple[str, Tensor | Piece]]:
    """What lies in a bucket whose bytes these are. `known` is what has been found there before, in memory of names."""
    size, found = memory.numel(), []
    known = {} if known is None else known
    for part in bucket.parts:
        if (value := known.get((name, bucket.buffer, part))) is not None:
            found.append((part.name, value))
            continue
        dtype = m.dtype_of(part.dtype)
        end = part.offset + part.count * dtype.itemsize
        if part.offset % 16 or end > size:
            raise HandoverFailed(f"weights: {part.name} is said to lie outside of its bucket")
        whole = part.start == 0 and part.count == math.prod(part.shape)
        try:
            flat = memory[part.offset : end].view(dtype)
            value = flat.view(part.shape) if whole else Piece(part.start, flat)
        except RuntimeError as error:  # a dtype that no memory is seen as
            raise HandoverFailed(f"weights: {part.name} is said to be {part.dtype} {part.shape}: {error}") from error
        known[name, bucket.buffer, part] = value
        found.append((part.name, value))
    if bucket.checksum is not None and checksum(memory[: _used(bucket)]) != bucket.checksum:
        names = ", ".join(sorted({part.name for part in bucket.parts})[:3])
        raise HandoverFailed(f"weights: what arrived is not what was sent (checksum of a bucket with {names})")
    return found


@contextlib.contextmanager
def no_room(size: int, what: str) -> Iterator[None]:
    """HandoverFailed for the OSError of a file in memory that has no room for so many bytes."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
        why = "there is no room for it" if full else error.strerror
        raise HandoverFailed(f"weights: shared memory of {size} bytes for {what}: {why}") from error


def _used(bucket: m.Bucket) -> int:
    ends = (part.offset + part.count * m.dtype_of(part.dtype).itemsize for part in bucket.parts)
    return -(-max(ends, default=0) // 16) * 16


def gpu_name(device: torch.device) -> str:
    """What both processes call a GPU, whichever number it has in each of them. "" for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def gpu_named(name: str) -> torch.device | None:
    """This process's number of a GPU; None where it does not see that."""
    every = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((device for device in every if gpu_name(device) == name), None)


def checksum(used: Tensor) -> int:
    """Of some bytes, with zeros to a multiple of 8: the wrapping sum of their 64-bit words, each turned by its place.
    It sees any one word that is wrong, and words that have changed places."""
    if used.numel() % 8:
        used = torch.cat([used, used.new_zeros(-used.numel() % 8)])
    words = used.view(torch.int64)
    places = torch.arange(1, 1 + len(words), device=words.device, dtype=torch.int64)
    return int((words ^ (places * -7046029254386353131)).mul_(places | 1).sum())


class HostMemory:
    """An anonymous file, of a size that nobody can change.

    tensor   its bytes
    handle   what another process of this host opens it by, while this one has it
    pin      for a GPU: copies to and from it are several times as fast; slow ones are right too
    """

    def __init__(self, file: int, size: int, keep: bool, pin: bool):
        self.handle = _FILE.pack(os.getpid(), file)
        self._file = file if keep else None
        self._map = mmap.mmap(file, size)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = False
        if pin:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0)) == 0
        self._pointer = self.tensor.data_ptr()

    @classmethod
    def made(cls, name: str, size: int, pin: bool = False) -> "HostMemory":
        """HandoverFailed where there is no room."""
        file = os.memfd_create(f"{_PREFIX}{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with no_room(size, "a bucket"):
                os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            return cls(file, size, keep=True, pin=pin)
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def opened(cls, handle: bytes, name: str, size: int, pin: bool = False) -> "HostMemory":
        """What another process has made. HandoverFailed where it cannot be had, or is something else."""
        if len(handle) != _FILE.size:
            raise HandoverFailed(f"weights: a handle of shared memory has {len(handle)} bytes, expected {_FILE.size}")
        pid, number = _FILE.unpack(handle)
        path = f"/proc/{pid}/fd/{number}"
        try:
            found = os.readlink(path)
            if found != f"/memfd:{_PREFIX}{name} (deleted)":  # a number of another host, or another PID namespace
                raise FileNotFoundError(errno.ENOENT, f"it is {found}")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise HandoverFailed(
                f"weights: shared memory of process {pid} cannot be opened ({path}: {error.strerror}): both processes "
                "must be on one host, of one user and in one PID namespace (containers: share it)"
            ) from error
        try:
            found = os.fstat(file).st_size
            if found != size:
                raise HandoverFailed(f"weights: shared memory of process {pid} has {found} bytes, expected {size}")
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise HandoverFailed(f"weights: shared memory of process {pid} is not sealed: its size could change")
            return cls(file, size, keep=False, pin=pin)
        finally:
            os.close(file)

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pointer)
        # Never closed: it ends with the last view of it. torch.frombuffer holds the map itself and no buffer of it, so
        # that closing it would succeed, and leave such views to whatever is mapped there next.
        self.tensor = self._map = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _CudaMemory:
    """Memory of a GPU by the driver's own calls: torch's allocator would hand out parts of larger blocks, and memory of
    expandable segments, which other processes cannot open."""

    def __init__(self, pointer: int, size: int, device: torch.device, end: str):
        self.pointer, self.size, self.device, self._end = pointer, size, device, end

    @classmethod
    def taken(cls, size: int, device: torch.device) -> "_CudaMemory":
        pointer = ctypes.c_uint64()
        with _current(device):
            _driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size), what=f"{size} bytes for a bucket")
        return cls(pointer.value, size, device, "cuMemFree_v2")

    @classmethod
    def opened(cls, handle: bytes, size: int, device: torch.device) -> "_CudaMemory":
        pointer = ctypes.c_uint64()
        if len(handle) != ctypes.sizeof(_Handle):
            wanted = ctypes.sizeof(_Handle)
            raise HandoverFailed(f"weights: CUDA IPC: a handle has {len(handle)} bytes, expected {wanted}")
        why = (
            "the memory of another process cannot be opened: containers need the right to trace (--cap-add=SYS_PTRACE, "
            "--ipc=host), and both processes must see the GPU"
        )
        with _current(device):
            _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), 1, what=why)
        return cls(pointer.value, size, device, "cuIpcCloseMemHandle")

    def handle(self) -> bytes:
        found = _Handle()
        with _current(self.device):
            _driver("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(self.pointer), what="a bucket's handle")
        return bytes(found)

    def tensor(self) -> Tensor:
        """Its bytes, as if they were the device's. It keeps no hold of the memory."""
        return _bytes_at(self.pointer, self.size, self.device)

    def close(self) -> None:
        with _current(self.device):
            torch.cuda.synchronize(self.device)
            _driver(self._end, ctypes.c_uint64(self.pointer), what="a bucket is given back")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Exported(ctypes.Structure):
    """DLManagedTensor, as dlpack.h has it: what torch takes for a tensor on the device that is said, whoever's memory
    it is. By __cuda_array_interface__ memory of another GPU would be that GPU's."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_exported: dict[int, tuple[_Exported, ctypes.Array]] = {}  # until torch has let go of each


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _let_go(at: int) -> None:
    _exported.pop(at, None)


def _bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    from torch.utils.dlpack import from_dlpack

    shape = (ctypes.c_int64 * 1)(size)
    deleter = ctypes.cast(_let_go, ctypes.c_void_p)
    made = _Exported(pointer, _DL_CUDA, device.index, 1, _DL_UINT, 8, 1, shape, None, 0, None, deleter)
    at = ctypes.addressof(made)
    _exported[at] = made, shape
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return from_dlpack(capsule(at, b"dltensor", None))


def _reader(device: torch.device, whose: torch.device) -> torch.device:
    """Of a GPU's memory: the GPU that is to read it, where that reaches it, else itself."""
    if device.type != "cuda":
        return whose
    index = torch.cuda.current_device() if device.index is None else device.index
    reaches = index == whose.index or torch.cuda.can_device_access_peer(index, whose.index)
    return torch.device("cuda", index) if reaches else whose


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """The driver's calls need the context that torch's make current in their thread."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()
        yield


def _driver(function: str, *args, what: str) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    code = getattr(library, function)(*args)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise HandoverFailed(f"weights: {what}: {function}: {said} ({code})")
