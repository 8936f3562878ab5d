"""The wire protocol, its values, errors and client. Imports numpy, protobuf and grpcio; no other package of ours."""
