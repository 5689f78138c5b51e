"""The steps of a chunk as one CUDA graph: captured at first sight of a shape, replayed from then on.

A graph reads and writes tensors of its own, so what it works on is copied in and out. A whole sequence as one graph
would take the driver gigabytes; a chunk is some dozens of small kernels, launched at once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.scan.activations import Activation
from stiefelkit.scan.engines.inplace import Loops, steps_back, steps_forward
from stiefelkit.scan.engines.problem import Problem

Results = tuple[Tensor, ...]

MOST = 16
"""Graphs that are kept, forward and back; each holds a chunk of states and a matrix."""


def capture(run: Callable[[], Results], device: torch.device) -> tuple[Callable[[], None], Results]:
    """Captures what `run` launches on a GPU; returns how to launch it again, and the tensors it then fills."""
    with torch.cuda.device(device):
        # Libraries set themselves up in a first run, which must be neither captured nor on the current stream.
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    return graph.replay, results


@dataclass
class _Graph:
    replay: Callable[[], None]
    inputs: list[Tensor]
    results: Results


class Graphs:
    """Captured functions, of which those used last are kept, so many at most."""

    def __init__(
        self,
        capture: Callable[[Callable[[], Results], torch.device], tuple[Callable[[], None], Results]] = capture,
        most: int = MOST,
    ):
        self.capture, self.most = capture, most
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, fn: Callable[..., Results], inputs: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Writes fn(*inputs) into given tensors.

        `key` is what `fn` depends on besides its inputs, their shapes and dtypes; it launches kernels on tensors of its
        own and on copies of its inputs, which it may overwrite, and reads no value.
        """
        device = inputs[0].device
        # Replays of one graph must not overlap: every stream has its own, and a lock keeps the copies together.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = key, device, stream, tuple((tuple(t.shape), t.dtype) for t in inputs)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = self._make(fn, inputs, device)
                if len(self._graphs) > self.most:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            for copy, tensor in zip(graph.inputs, inputs, strict=True):
                copy.copy_(tensor)
            graph.replay()
            for tensor, result in zip(into, graph.results, strict=True):
                tensor.copy_(result)

    def _make(self, fn: Callable[..., Results], inputs: Sequence[Tensor], device: torch.device) -> _Graph:
        # Tensors that are made in inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            copies = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
            replay, results = self.capture(lambda: fn(*copies), device)
        return _Graph(replay, copies, results)


GRAPHS = Graphs()
"""Those of this process."""


class GraphLoops(Loops):
    """Runs the chunks of a problem as graphs, and one by one the steps of those whose shape may not come again.

    These are the last chunk of a sequence, which is shorter, and all chunks of packed sequences; and inside a capture
    of the caller's, which then holds the steps themselves.
    """

    def __init__(self, p: Problem, graphs: Graphs = GRAPHS):
        super().__init__(p)
        self.graphs = graphs
        self.usual = 0 if p.is_packed or len(p.chunks) < 2 else max(chunk.steps for chunk in p.chunks)

    def forward(self, z: Tensor, saved: Tensor, h: Tensor, careful: bool = False) -> Tensor:
        """As `Loops.forward`."""
        if careful or not self._is_usual(z):
            return super().forward(z, saved, h, careful)
        act, _, reverse = self._settings
        shape, dtype = saved.shape, saved.dtype

        def steps(z: Tensor, h: Tensor, wt: Tensor, *bias: Tensor) -> Results:
            saved = z.new_empty(shape, dtype=dtype)
            step = act.step(h, bias[0] if bias else None)
            last = steps_forward(z, saved, h, lambda row, h: row.addmm_(h, wt), act, step, reverse)
            return z, saved, last

        last, bias = torch.empty_like(h), self.p.activation_bias
        inputs = [z, h, self.p.wt, *([] if bias is None else [bias])]
        self.graphs.run(("forward", self._settings), steps, inputs, [z, saved, last])
        return last

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """As `Loops.back`."""
        if not self._is_usual(delta):
            return super().back(delta, g, carry, h, saved)
        act, _, reverse = self._settings

        def steps(carry: Tensor, h: Tensor, saved: Tensor, w: Tensor, *outside: Tensor) -> Results:
            delta, g = torch.empty_like(h), outside[0] if outside else None
            before = steps_back(delta, g, carry, w, act.factors(h, saved), torch.empty_like(carry), reverse)
            return delta, before

        before = torch.empty_like(carry)
        inputs = [carry, h, saved, self.p.rows_w, *([] if g is None else [g])]
        self.graphs.run(("back", self._settings), steps, inputs, [delta, before])
        return before

    @property
    def _settings(self) -> tuple[Activation, int, bool]:
        return self.p.activation, self.p.n, self.p.reverse

    def _is_usual(self, rows: Tensor) -> bool:
        return len(rows) == self.usual and not (rows.is_cuda and torch.cuda.is_current_stream_capturing())
