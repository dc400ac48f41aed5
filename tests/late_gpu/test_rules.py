"""The stand-in keeps CUDA's rules: without an event or a wait the host and other streams see what was there before."""

from __future__ import annotations

import pytest
import torch

GPU = torch.device("cuda")


def page_locked(*numbers: float) -> torch.Tensor:
    memory = torch.empty(len(numbers), pin_memory=True)
    memory.numpy()[:] = numbers
    return memory


def test_work_runs_when_the_host_reads_it() -> None:
    assert (torch.ones(3, device=GPU) * 2).sum().item() == 6


def test_memory_that_was_not_written_is_nan() -> None:
    assert torch.empty(2, device=GPU).isnan().all()


def test_a_copy_from_page_locked_memory_takes_what_is_there_when_it_runs() -> None:
    host, late = page_locked(1, 2), torch.empty(2, device=GPU)
    late.copy_(host, non_blocking=True)
    host.zero_()
    assert late.tolist() == [0, 0]
    usual = torch.tensor([1.0, 2.0])
    late.copy_(usual, non_blocking=True)
    usual.zero_()
    assert late.tolist() == [1, 2]


def test_a_copy_to_page_locked_memory_is_there_after_its_event() -> None:
    host = page_locked(7, 7)
    host.copy_(torch.ones(2, device=GPU), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert host.tolist() == [7, 7]
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [1, 1]


def test_an_event_that_is_polled_is_reached() -> None:
    event = torch.cuda.Event()
    _ = torch.ones(2, device=GPU) + 1
    event.record()
    assert [event.query(), event.query()] == [False, True]


def test_a_stream_sees_what_another_computed_once_it_waits() -> None:
    source, host = torch.ones(2, device=GPU), page_locked(7, 7)
    torch.cuda.synchronize()
    source += 1
    beside = torch.cuda.Stream(GPU)
    for wait, seen in ((False, 1), (True, 2)):
        if wait:
            beside.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(beside):
            host.copy_(source, non_blocking=True)
        beside.synchronize()
        assert host.tolist() == [seen, seen]


def test_memory_is_used_again_once_its_tensor_is_gone() -> None:
    held = torch.ones(2, device=GPU)
    host, beside = page_locked(7, 7), torch.cuda.Stream(GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        host.copy_(held, non_blocking=True)
    del held
    torch.cuda.synchronize()
    beside.synchronize()
    assert host.isnan().all()


def test_a_graph_reads_the_addresses_that_it_was_captured_with() -> None:
    source = torch.ones(2, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        computed = source * 2
    assert computed.isnan().all()
    source.fill_(3)
    graph.replay()
    assert computed.tolist() == [6, 6]


def test_a_graph_cannot_use_memory_that_was_freed() -> None:
    source = torch.ones(2, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = source + 1
        computed = between * 2
    view = source[1:]
    del source, between
    graph.replay()
    assert computed.tolist() == [4, 4]
    del view
    with pytest.raises(RuntimeError, match="memory that was freed after its capture"):
        graph.replay()


def test_graphs_of_one_pool_share_memory() -> None:
    pool, graphs, results = torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)], []
    source = torch.ones(2, device=GPU)
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            results.append(source + 1)
    graphs[0].replay()
    assert results[0].tolist() == [2, 2]
    graphs[1].replay()
    assert results[0].isnan().all()


def test_waiting_is_refused_while_a_graph_is_captured() -> None:
    source = torch.ones(2, device=GPU)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(object()):
        source.tolist()


def test_numbers_of_the_host_are_no_operands() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(2, device=GPU) + torch.ones(2)
    assert (torch.ones(2, device=GPU) + torch.tensor(1.0)).tolist() == [2, 2]
