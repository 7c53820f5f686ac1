import threading
import time

import pytest
import torch

from oelm.config import resolve
from oelm.model import products
from oelm.model.build import build_model
from oelm.model.products import multiply


@pytest.fixture
def library(monkeypatch):
    """numpy's, for products of any size, and what it has been asked for."""
    monkeypatch.setattr(products, "cpu_name", lambda: "AMD")
    monkeypatch.setattr(products, "cores", lambda: 4)
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(products, "LARGE_ALONE", 0)
    find = products._openblas
    find.cache_clear()
    if find() is None:
        pytest.skip("this numpy has no OpenBLAS of its own")
    asked, sgemm = [], products._sgemm
    monkeypatch.setattr(products, "_sgemm", lambda *given: asked.append(given[-2].shape) or sgemm(*given))
    yield asked
    find.cache_clear()


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(rows, columns, how):
    chance = torch.Generator().manual_seed(rows * columns)
    match how:
        case "plain":
            return torch.randn(rows, columns, generator=chance)
        case "transposed":
            return torch.randn(columns, rows, generator=chance).t()
        case _:  # part of a wider one
            return torch.randn(rows, columns + 7, generator=chance)[:, :columns]


@pytest.mark.parametrize(("m", "k", "n"), [(100, 33, 70), (70, 5, 300), (1, 1, 1), (2, 40, 129)])
@pytest.mark.parametrize("a_how", ["plain", "transposed", "part"])
@pytest.mark.parametrize("b_how", ["plain", "transposed", "part"])
def test_a_product_is_that_of_float64_however_the_matrices_lie(library, threads, m, k, n, a_how, b_how):
    a, b, out = matrix(m, k, a_how), matrix(k, n, b_how), matrix(m, n, "part")
    before, beyond = out.double(), out._base[:, n:].clone()
    exact = a.double() @ b.double()
    torch.testing.assert_close(multiply(a, b, out, add=True).double(), before + exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(multiply(a, b, out.fill_(torch.nan)).double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(multiply(a, b).double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(out._base[:, n:], beyond)
    assert library


def test_each_thread_has_a_part_of_the_longer_side(library, threads):
    multiply(torch.randn(64, 8), torch.randn(8, 480))
    assert sorted(library) == sorted([(64, 480 // threads)] * threads)
    library.clear()
    multiply(torch.randn(480, 8), torch.randn(8, 64))
    assert sorted(library) == sorted([(480 // threads, 64)] * threads)


@pytest.mark.parametrize(
    "a",
    [torch.ones(1, 1).expand(20, 30), torch.randn(20, 60)[:, ::2], torch.randn(20, 30, dtype=torch.float64)],
    ids=["expanded", "every second column", "double"],
)
def test_what_the_library_cannot_take_is_torchs(library, a):
    b = torch.randn(30, 10, dtype=a.dtype)
    torch.testing.assert_close(multiply(a, b), a @ b)
    assert not library


def test_matrices_that_do_not_fit_are_refused(library):
    for a, b, out in [((4, 5), (6, 7), (4, 7)), ((4, 5), (5, 7), (3, 7))]:
        with pytest.raises(RuntimeError):
            multiply(torch.randn(a), torch.randn(b), torch.zeros(out), add=True)
    assert not library


def test_numpy_has_as_many_threads_as_before(library):
    blas = products._openblas()
    before = blas.scipy_openblas_get_num_threads64_()
    within = []
    try:
        blas.scipy_openblas_set_num_threads64_(2)
        with products._one_thread(blas):
            within.append(blas.scipy_openblas_get_num_threads64_())
        assert within == [1]
        assert blas.scipy_openblas_get_num_threads64_() == 2
    finally:
        blas.scipy_openblas_set_num_threads64_(before)


def test_a_product_is_torchs_unless_each_thread_has_enough_of_it(library, threads, monkeypatch):
    monkeypatch.setattr(products, "LARGE", 1_000)
    monkeypatch.setattr(products, "LARGE_ALONE", 1_000)
    multiply(torch.randn(10, 100), torch.randn(100, threads - 1))
    assert not library
    multiply(torch.randn(10, 100), torch.randn(100, threads))
    assert library


@pytest.mark.parametrize("limit", ["cores", "MOST_THREADS"])
def test_more_threads_than_there_is_room_for_are_torchs(library, monkeypatch, threads, limit):
    monkeypatch.setattr(products, limit, (lambda: 2) if limit == "cores" else 2)
    multiply(torch.randn(20, 30), torch.randn(30, 10))
    assert bool(library) == (threads <= 2)


def test_no_thread_still_writes_when_a_product_has_failed(library, monkeypatch):
    """A notebook's Ctrl-C, say: the next product may have the same memory."""
    done, sgemm = [], products._sgemm

    def failing(*given):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.1)
        done.append(sgemm(*given))

    monkeypatch.setattr(products, "_sgemm", failing)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        multiply(torch.randn(64, 8), torch.randn(8, 64))
    assert len(done) == 1


def test_other_processors_have_torchs(library, monkeypatch):
    monkeypatch.setattr(products, "cpu_name", lambda: "Intel(R) Xeon(R)")
    products._openblas.cache_clear()
    multiply(torch.randn(200, 300), torch.randn(300, 100))
    assert not library


@pytest.mark.parametrize("arm", ["baseline", "oelm_v2", "oelm_sliced"])
def test_loss_and_gradients_of_a_model_are_the_same_with_either_library(library, monkeypatch, arm):
    shape = dict(preset="tiny", d_model=48, num_heads=3, num_layers=2, seq_len=40, vocab_size=101, dropout=0.0)
    model = build_model(resolve(shape | {"model_type": arm}))
    tokens = torch.randint(0, 101, (3, 41), generator=torch.Generator().manual_seed(0))

    def solve():
        model.zero_grad()
        value = model(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    found = solve()
    assert library
    monkeypatch.setattr(products, "_openblas", lambda: None)
    torch.testing.assert_close(found, solve(), rtol=1e-4, atol=1e-6)
