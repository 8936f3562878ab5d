"""The wire, its values, its errors and its client. Imports numpy, protobuf and grpcio; nothing else of ours."""
