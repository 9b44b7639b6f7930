"""A manager's numbers for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from .ground.arguments import whole_number
from .manager import TieringManager

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class MetricsServer:
    """Answers Prometheus on a port, on a thread of its own, until `close`. It is a context manager.

    Attributes:
        port: The port that it listens on.
    """

    def __init__(self, manager: TieringManager, port: int, address: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(_Collector(manager))
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Answers no more. Closing again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export(manager: TieringManager, port: int, *, address: str = "127.0.0.1") -> MetricsServer:
    """Serves what `manager.stats()` has, as it is when Prometheus asks, at http://address:port/metrics.

    "host.used.peak" is `tiered_mem_host_used_peak`, and "offloaded.bytes.total" is the counter
    `tiered_mem_offloaded_bytes_total`. Sizes are in bytes. Each has the label `device`. Words, such as the state of
    the disk tier, are labels of `tiered_mem_info`.

    Args:
        manager: It is not kept alive. When it is gone there are no numbers.
        port: 0 is any that is free; the result has its number.
        address: Of the network interface to listen on. "0.0.0.0" is all of them.

    Raises:
        ImportError: The package prometheus-client is missing: pip install 'tiered_mem[metrics]'.
        OSError: The port is taken.
        ValueError: The port is below 0.
    """
    whole_number("port", port, at_least=0)
    try:
        return MetricsServer(manager, port, address)
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ImportError(
            "metrics are served by the package prometheus-client: pip install 'tiered_mem[metrics]'",
            name=error.name,
        ) from None


class _Collector:
    """Gives the numbers of a manager as they are when it is asked."""

    def __init__(self, manager: TieringManager) -> None:
        self._manager = weakref.ref(manager)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        manager = self._manager()
        if manager is None:
            return
        words = {}
        device = str(manager.device.torch_device)
        for key, value in manager.stats().items():
            name = f"tiered_mem_{key.replace('.', '_')}"
            if isinstance(value, str):
                words[key.replace(".", "_")] = value
                continue
            kind = CounterMetricFamily if key.endswith(".total") else GaugeMetricFamily
            family = kind(name, f"{key} of manager.stats()", labels=["device"])
            family.add_metric([device], value)
            yield family
        yield InfoMetricFamily("tiered_mem", "words of manager.stats()", {"device": device, **words})
