"""Products of matrices on a CPU: by torch's library (MKL), or by numpy's (OpenBLAS) where that is the faster one.

On a processor of AMD one thread of OpenBLAS does 1.05 to 1.2 x what one of MKL does. It is called for parts of a
product in threads of their own: its own threads wait in a way that keeps torch's from working. Starting some takes
0.1 ms, so small products stay with torch. With two threads a step of medium-512 takes 0.9, with one 0.85 of its time.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from numpy._core import _multiarray_umath  # type: ignore[attr-defined]
from torch import Tensor
from torch.profiler import record_function

from oelm.machine import cores, cpu_name
from oelm.model.by_hand import is_real

LARGE, LARGE_ALONE = 2**30, 2**29
"""Multiplications for each thread from which starting it is worth while; for one alone, where none is started."""
MOST_THREADS = 32
"""More are torch's: as numpy builds it, OpenBLAS has room for 64 that call it at once."""
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
"""Names of cblas.h."""
_ONE_AT_A_TIME = threading.Lock()


def multiply(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None, add: bool = False) -> Tensor:
    """a b, written or added to `out`."""
    threads = torch.get_num_threads()
    large = a_MK.shape[0] * b_KN.numel() >= (LARGE_ALONE if threads == 1 else LARGE * threads)
    if large and threads <= min(MOST_THREADS, cores()):
        out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out_MN is None else out_MN
        library = _openblas()
        if library is not None and _as_it_wants(a_MK, b_KN, out_MN):
            return _in_threads(library, threads, a_MK, b_KN, out_MN, add)
    if add and out_MN is not None:
        return out_MN.addmm_(a_MK, b_KN)
    return torch.mm(a_MK, b_KN, out=out_MN)


def _as_it_wants(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> bool:
    """It looks at nothing itself: what it cannot take is torch's to compute, or to refuse."""
    fitting = a_MK.shape[1] == b_KN.shape[0] and out_MN.shape == (a_MK.shape[0], b_KN.shape[1])
    floats = all(is_real(x) and x.is_cpu and x.dtype == torch.float32 for x in (a_MK, b_KN, out_MN))
    return fitting and floats and 0 not in (_layout(a_MK)[0], _layout(b_KN)[0]) and _layout(out_MN)[0] == PLAIN


def _in_threads(library: ctypes.CDLL, threads: int, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, add: bool) -> Tensor:
    parts = _parts(a_MK, b_KN, out_MN, threads)
    with _one_thread(library), record_function("oelm::multiply"):
        others: list[threading.Thread] = []
        try:
            for part in parts[1:]:
                others.append(threading.Thread(target=_sgemm, args=(library, *part, add)))
                others[-1].start()
            _sgemm(library, *parts[0], add)
        finally:  # whatever happened, nobody writes into `out` any more
            for thread in others:
                if thread.ident:
                    thread.join()
    return out_MN


def _parts(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The product in `count` that can be made at the same time: of rows or of columns, whichever are more."""
    M, N = out_MN.shape
    size = -(-max(M, N) // (16 * count)) * 16
    if M > N:
        return [(a, b_KN, out) for a, out in zip(a_MK.split(size), out_MN.split(size), strict=True)]
    return [(a_MK, b, out) for b, out in zip(b_KN.split(size, 1), out_MN.split(size, 1), strict=True)]


def _sgemm(library: ctypes.CDLL, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, add: bool) -> None:
    (M, K), N = a_MK.shape, b_KN.shape[1]
    (how_a, step_a), (how_b, step_b) = _layout(a_MK), _layout(b_KN)
    library.scipy_cblas_sgemm64_(
        ROW_MAJOR, how_a, how_b, M, N, K, 1.0, a_MK.data_ptr(), step_a, b_KN.data_ptr(), step_b,
        float(add), out_MN.data_ptr(), out_MN.stride(0),
    )  # fmt: skip


def _layout(x: Tensor) -> tuple[int, int]:
    """How it lies in memory, and the elements from one row, or column, to the next; 0 for any other way."""
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return PLAIN, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= x.shape[0]:
        return TRANSPOSED, x.stride(1)
    return 0, 0


@contextmanager
def _one_thread(library: ctypes.CDLL) -> Iterator[None]:
    """Its own threads would go on to spin where torch's are to work next. The setting is the whole process's."""
    with _ONE_AT_A_TIME:
        before = library.scipy_openblas_get_num_threads64_()
        library.scipy_openblas_set_num_threads64_(1)
        try:
            yield
        finally:
            library.scipy_openblas_set_num_threads64_(before)


@cache
def _openblas() -> ctypes.CDLL | None:
    """numpy's, on processors of AMD, if it has one. On others torch's MKL is the faster one."""
    if "AMD" not in cpu_name():
        return None
    library = ctypes.CDLL(_multiarray_umath.__file__)  # with what it has loaded, but on Windows
    if not hasattr(library, "scipy_cblas_sgemm64_"):
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.scipy_cblas_sgemm64_.restype = None
    library.scipy_cblas_sgemm64_.argtypes = [
        *3 * [ctypes.c_int], *3 * [number], ctypes.c_float, pointer, number, pointer, number,
        ctypes.c_float, pointer, number,
    ]  # fmt: skip
    return library
