"""Reflection, by which tools without stubs learn what a server offers, as v1 and as v1alpha.

Today's tools ask for v1 first, some for nothing else, older ones for v1alpha alone. The package
grpcio-reflection has v1alpha; v1 is the same messages under another package name.
Knows no service but its own.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = reflection.SERVICE_NAME


def enable_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Serves reflection on `server`, about these services and itself."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*service_names, V1, V1ALPHA))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, methods),))


def _describe_v1() -> None:
    """Makes v1 known where v1alpha is, so that tools which ask what it is are told.

    A second time changes nothing.
    """
    v1alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(v1alpha)
    # Names of types, the package and the file's own name all change in the same way.
    text = text_format.MessageToString(v1alpha).replace("/v1alpha/", "/v1/")
    v1 = text_format.Parse(text.replace(".v1alpha", ".v1"), descriptor_pb2.FileDescriptorProto())
    v1.ClearField("options")  # they name packages of v1alpha
    descriptor_pool.Default().AddSerializedFile(v1.SerializeToString())
