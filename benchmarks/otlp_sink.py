"""An OTLP receiver that counts what it is sent and forgets it: `python -m benchmarks.otlp_sink`.

Prints its address, then the numbers of spans and metric points once a line comes in or input ends.
"""

import sys
from collections.abc import Iterable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

# Generic in grpc's stubs, a plain class at run time.
_Context = Any


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    spans = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: _Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.spans += sum(
            len(scope.spans) for one in request.resource_spans for scope in one.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    pushes = 0

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: _Context
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self.pushes += 1
        return metrics_service_pb2.ExportMetricsServiceResponse()


def serve(lines: Iterable[str]) -> None:
    """Receives until a line comes in, or none can come any more."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    traces, metrics = _Traces(), _Metrics()
    # Of untyped stubs.
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(traces, server)
    add_metrics(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    next(iter(lines), None)
    server.stop(1).wait()
    print(f"{traces.spans} {metrics.pushes}", flush=True)


if __name__ == "__main__":
    serve(sys.stdin)
